"""What runs in a worker process, whichever model runner vLLM uses."""
