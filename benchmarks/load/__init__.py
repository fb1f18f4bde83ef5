"""A load that changes in mid-run, step by step."""
