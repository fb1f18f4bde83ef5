"""The adapters to vLLM, in one folder for each of its processes; `seams/` lists what they touch."""
