"""What to guess: draft trees, tries, proposers, budgets. NumPy only: no torch, no vllm."""
