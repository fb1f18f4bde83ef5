"""The cache file: what a proposer has learned, kept between runs."""
