#!/usr/bin/env python3
"""Train a small EAGLE head on answers of the model itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learning.drafter import main

sys.exit(main(sys.argv[1:]))
