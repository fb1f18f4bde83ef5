#!/usr/bin/env python3
"""Make a folder with vLLM for CUDA, for a machine with a GPU and no network."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu.bundle.pack import main

sys.exit(main(sys.argv[1:]))
