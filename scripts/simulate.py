#!/usr/bin/env python3
"""Compare proposers without a model: recorded generations replayed as the engine would."""

import sys

from lookahead_vllm.cli.simulate import main

sys.exit(main(sys.argv[1:]))
