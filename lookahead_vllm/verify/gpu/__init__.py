"""Tree attention and KV moves on GPUs, in Triton kernels."""
