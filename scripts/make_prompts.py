#!/usr/bin/env python3
"""Make a file of prompts with dictated answers for `bench.py --target-guided`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.prompt_files.make import main

sys.exit(main(sys.argv[1:]))
