#!/usr/bin/env python3
"""`lookahead-vllm cache build`; with --info FILE, `lookahead-vllm cache info FILE`."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lookahead_vllm.cli.main import main

parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
parser.add_argument("--info")
options, rest = parser.parse_known_args()
command = ["build", *rest] if options.info is None else ["info", options.info, *rest]
sys.exit(main(["cache", *command]))
