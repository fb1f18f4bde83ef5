#!/usr/bin/env python3
"""End engines in many ways, repeatedly, and check that their cache files were saved."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.ends.command_line import main

sys.exit(main(sys.argv[1:]))
