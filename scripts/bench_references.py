#!/usr/bin/env python3
"""Measure how much clients with the largest allowed references slow down another client."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.serving.references import main

sys.exit(main(sys.argv[1:]))
