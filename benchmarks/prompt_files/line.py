"""One line of a file of prompts."""

from typing import Any

Line = dict[str, Any]
"""`prompt_token_ids`, `output_token_ids`, and perhaps `category` and `reference_token_ids`."""
