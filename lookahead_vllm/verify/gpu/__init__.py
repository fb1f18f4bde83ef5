"""Tree attention and KV moves on GPUs, as Triton kernels."""
