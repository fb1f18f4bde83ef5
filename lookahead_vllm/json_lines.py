"""Files of JSON lines: one value a line, in UTF-8."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_json_lines(path: Path, error: type[ValueError]) -> Iterator[tuple[int, Any]]:
    """The number and the value of each line that is not blank, in order.

    Lines end with a line feed. Other separators, like U+2028, may be part of a string. `error` is
    raised, with a message that names the file and the line, if the file cannot be read or a line is
    not JSON.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    value = parse_line(line)
                except ValueError as reason:
                    raise error(f"{path}, line {number}: {reason}") from None
                yield number, value
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror}") from None


def are_token_ids(value: Any) -> bool:
    """Whether a value is a list of token ids; it may be empty."""
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 2**31 for i in value)


def parse_line(line: bytes) -> Any:
    """The value of a line; a byte order mark before it is skipped.

    Raises
    ------
    ValueError
        The line is not JSON; the message is one sentence that begins with `it`.
    """
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8") from None
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    except ValueError as error:  # also of a number with too many digits
        raise ValueError(f"it is not JSON ({error})") from None
