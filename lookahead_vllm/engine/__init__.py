"""The adapters to vLLM; `seams.md` lists every place in it that they replace or override."""
