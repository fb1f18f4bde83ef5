#!/usr/bin/env python3
"""Measure the step compression of the lookahead branch: tokens a step by W, N, G and source."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engines.window import main

sys.exit(main(sys.argv[1:]))
