#!/usr/bin/env python3
"""`lookahead-vllm simulate`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lookahead_vllm.cli.main import main

sys.exit(main(["simulate", *sys.argv[1:]]))
