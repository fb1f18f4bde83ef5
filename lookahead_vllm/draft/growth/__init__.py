"""Draft trees: which tokens may come next, how likely they are, and how trees grow from them."""
