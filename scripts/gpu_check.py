#!/usr/bin/env python3
"""Check lookahead's GPU attention on this machine: is it right, and how fast is it?"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu.check import main

if __name__ == "__main__":  # their processes import this file
    sys.exit(main(sys.argv[1:]))
