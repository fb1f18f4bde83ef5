#!/usr/bin/env python3
"""Check lookahead's GPU attention on this machine: is it right, and how fast is it?"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu.check import main

sys.exit(main(sys.argv[1:]))
