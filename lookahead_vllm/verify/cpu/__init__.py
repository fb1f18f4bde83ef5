"""Tree attention and KV moves on CPUs, as compiled C++ and as plain PyTorch."""
