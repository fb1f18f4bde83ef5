#!/usr/bin/env python3
"""Measure the time that lookahead adds to a step outside the model, on a very small model."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engines.step_overhead import main

sys.exit(main(sys.argv[1:]))
