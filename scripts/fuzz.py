#!/usr/bin/env python3
"""Send the same random requests to plain vLLM and lookahead until their answers differ."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fuzz.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
else:  # an engine's process: a worker can start after numba is loaded if the drafter is, too
    import lookahead_vllm.engine.drafter.drafter  # noqa: F401
    import tests.support.proposers  # noqa: F401  it registers the tests' proposers
