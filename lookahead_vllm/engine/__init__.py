"""The adapters to one vLLM release. `seams.py` lists every place where they touch it."""
