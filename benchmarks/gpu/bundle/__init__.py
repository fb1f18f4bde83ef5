"""A folder with vLLM for CUDA, to be carried to a machine with a GPU and no network."""
