"""The lookahead branch: a window refined by Jacobi iteration, and its pool of n-grams."""
