"""Adapters to vLLM's first model runner."""
