"""Rollouts: groups of samples of the same prompts, again and again while the weights change."""
