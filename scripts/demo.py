#!/usr/bin/env python3
"""Compare lookahead with plain vLLM: two servers, one after the other, with the same prompts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.serving.demo import main

sys.exit(main())
