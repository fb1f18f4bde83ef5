#!/usr/bin/env python3
"""Send every request option of vLLM's OpenAI server to a plain and a lookahead server."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.request_parity.compare import main

sys.exit(main(sys.argv[1:]))
