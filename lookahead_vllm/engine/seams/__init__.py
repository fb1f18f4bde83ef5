"""Every place where lookahead-vllm touches vLLM."""
