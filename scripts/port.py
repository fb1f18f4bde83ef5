#!/usr/bin/env python3
"""Compare a release of vLLM with what lookahead uses of it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.port.compare import main

sys.exit(main(sys.argv[1:]))
