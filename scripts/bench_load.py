#!/usr/bin/env python3
"""Change the load in mid-run, and write down what every step does: the batch, and a busy core."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.load.compare import main

sys.exit(main(sys.argv[1:]))
