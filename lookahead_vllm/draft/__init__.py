"""Drafting: draft trees, proposers, budgets and the cache file. Imports neither torch nor vllm."""
