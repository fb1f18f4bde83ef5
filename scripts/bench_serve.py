#!/usr/bin/env python3
"""Compare servers under load: requests arrive at random and wait for each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.serving.compare import main

sys.exit(main(sys.argv[1:]))
