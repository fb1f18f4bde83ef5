"""The lookahead branch: a window refined by Jacobi iteration, and the comb that adds it to a tree."""
