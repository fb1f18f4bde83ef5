"""The lookahead branch: a window refined by Jacobi iteration, and its comb in a tree."""
