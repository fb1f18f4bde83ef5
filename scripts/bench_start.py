#!/usr/bin/env python3
"""Measure a server's start, from the command to the first answer, with and without lookahead."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.start.compare import main

sys.exit(main(sys.argv[1:]))
