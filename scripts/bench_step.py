#!/usr/bin/env python3
"""Measure the time that a simulated device waits for the host in a step."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device.compare import main

sys.exit(main(sys.argv[1:]))
