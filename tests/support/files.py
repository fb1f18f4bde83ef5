"""Files for tests."""

import json
from pathlib import Path
from typing import Any


def jsonl(path: Path, *lines: Any) -> Path:
    """Write a line for each of `lines`: a text as it is, any other value as JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path
