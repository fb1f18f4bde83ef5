#!/usr/bin/env python3
"""Compare vLLM's causal kernel on a chain with our compiled tree kernel and plain torch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernels.tree_attention import main

main()
