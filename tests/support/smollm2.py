"""The real small model of the tests."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMOLLM2 = Path(
    os.environ.get(
        "LOOKAHEAD_TEST_MODEL", str(ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct")
    )
)
"""Its folder, as `scripts/prepare_model.py` makes it."""
