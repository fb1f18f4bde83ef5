#!/usr/bin/env python3
"""`lookahead-vllm check --wheel`, with its wheels or folders as the arguments."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lookahead_vllm.cli.check_seams import main

sys.exit(main(sys.argv[1:]))
