#!/usr/bin/env python3
"""Build a cache file from documents or past answers, so that a server starts warm."""

import sys

from lookahead_vllm.cli.cache import main

sys.exit(main(sys.argv[1:]))
