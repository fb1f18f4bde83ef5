#!/usr/bin/env python3
"""Learn the acceptance rates that a new trie starts from."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learning.priors import main

sys.exit(main(sys.argv[1:]))
