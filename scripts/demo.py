#!/usr/bin/env python3
"""Lookahead and plain vLLM, side by side: two real servers, one after the other, same prompts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.serving.demo import main

sys.exit(main())
