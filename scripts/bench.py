#!/usr/bin/env python3
"""Compare speculative decoding methods in vLLM: same prompts, a fresh engine for each run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engines.compare import main

sys.exit(main(sys.argv[1:]))
