"""What measures lookahead-vllm, and is not installed with it: the programs behind `scripts/`."""
