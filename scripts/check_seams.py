#!/usr/bin/env python3
"""Compare what lookahead uses of vLLM with a release of vLLM that is not installed."""

import sys

from lookahead_vllm.cli.check_seams import main

sys.exit(main(sys.argv[1:]))
