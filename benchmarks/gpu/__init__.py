"""Checks on a machine with a GPU: attention, plain vLLM, and the project's own tests."""
