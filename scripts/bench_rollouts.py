#!/usr/bin/env python3
"""Compare methods on rollouts: samples of the same prompts, again and again as weights change."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rollouts.compare import main

sys.exit(main(sys.argv[1:]))
