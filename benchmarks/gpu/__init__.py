"""Checks on a machine with a GPU."""
