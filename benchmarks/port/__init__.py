"""Compares releases of vLLM with what lookahead uses of it."""
