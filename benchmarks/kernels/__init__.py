"""Kernels measured without an engine."""
