"""Adapters to vLLM's Model Runner V2, with asynchronous scheduling."""
