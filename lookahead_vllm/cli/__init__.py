"""The command `lookahead-vllm`."""
