"""Is it right: tree attention, acceptance, KV moves. PyTorch only: no vllm."""
