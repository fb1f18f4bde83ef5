#!/usr/bin/env python3
"""Change the batch size and the load of a core during a run, and record every step."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.load.compare import main

sys.exit(main(sys.argv[1:]))
