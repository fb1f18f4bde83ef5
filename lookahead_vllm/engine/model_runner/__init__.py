"""Adapters to vLLM's second model runner (Model Runner V2), with asynchronous scheduling."""
