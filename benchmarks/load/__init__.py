"""A load that changes during a run, measured step by step."""
