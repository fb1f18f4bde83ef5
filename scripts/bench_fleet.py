#!/usr/bin/env python3
"""Compare engines behind a load balancer: each alone, as a fleet that shares, and one for all."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fleet.compare import main

sys.exit(main(sys.argv[1:]))
