"""Tree attention and KV moves on CPUs, in compiled C++ and in plain PyTorch."""
