"""Trees under a grammar."""
