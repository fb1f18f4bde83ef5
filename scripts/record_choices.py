#!/usr/bin/env python3
"""Record a model's likeliest tokens at every position of recorded answers."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # vLLM's processes import this file, and cannot start beside numba
    from benchmarks.learning.choices import main

    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    sys.exit(main(sys.argv[1:]))
