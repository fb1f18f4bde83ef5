"""The cache file, which keeps what a proposer has learned between runs."""
