"""Kernels of vLLM's Model Runner V2 for CPUs; `table.py` lists and installs them."""
