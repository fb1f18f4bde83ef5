#!/usr/bin/env python3
"""Send hostile requests to a server with lookahead, and check that other clients are unaffected."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.hostile.command_line import main

sys.exit(main(sys.argv[1:]))
