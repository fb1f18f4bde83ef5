"""Tree attention in vLLM: what it computes in a pass, and the backends for each device."""
