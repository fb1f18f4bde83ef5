#!/usr/bin/env python3
"""Make a folder with vLLM for CUDA, for a machine with a GPU and no network."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu.bundle.pack import main

if __name__ == "__main__":  # their processes import this file
    sys.exit(main(sys.argv[1:]))
