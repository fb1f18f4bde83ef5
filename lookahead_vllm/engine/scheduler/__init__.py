"""What runs in the engine core's process, with vLLM's scheduler."""
