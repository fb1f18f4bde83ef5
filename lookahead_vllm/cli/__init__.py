"""The console command `lookahead-vllm`: `main.py`, and one module a subcommand."""
