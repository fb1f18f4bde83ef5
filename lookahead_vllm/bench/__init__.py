"""The rooms behind `scripts/bench.py`: prompts and methods in, fresh engines, rows out."""
