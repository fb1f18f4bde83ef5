"""Recorded generations: read, filtered, and recombined."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lookahead_vllm.simulation.traces import Trace, TraceError, TraceFile, load_traces, resample
from tests.support.files import jsonl


def trace(prompt: list[int], output: list[int], category: str = "s/c") -> Trace:
    return Trace(np.array(prompt, np.int32), np.array(output, np.int32), category)


def file_of(*traces: Trace, name: str = "f.jsonl") -> TraceFile:
    return TraceFile(Path(name), list(traces), too_short=0)


def line(output: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": [1, 2], "output_token_ids": output, **more}


def test_traces_are_filtered_then_shuffled_then_limited(tmp_path: Path) -> None:
    lines = [line([i, i], suite="s", category="c", loops=i % 4 == 0) for i in range(20)]
    path = jsonl(tmp_path / "t.jsonl", line([5]), *lines, "")

    def first_tokens(**options: Any) -> list[int]:
        return [int(one.output[0]) for one in load_traces(path, **options).traces]

    assert first_tokens() == list(range(20))
    assert first_tokens(limit=3) == [0, 1, 2]
    assert first_tokens(limit=3, no_loops=True) == [1, 2, 3]
    shuffled = first_tokens(shuffle=0, no_loops=True)
    assert len(shuffled) == 15 and shuffled != sorted(shuffled)
    assert first_tokens(shuffle=0, no_loops=True, limit=4) == shuffled[:4]
    loaded = load_traces(path)
    assert loaded.too_short == 1 and loaded.traces[0].category == "s/c" and loaded.num_tokens == 40


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("{", r"t.jsonl, line 2: it is not JSON"),
        ("[1]", r"t.jsonl, line 2: an object with"),
        ({"prompt_token_ids": [1]}, r"t.jsonl, line 2: `output_token_ids` must be a list"),
        (line([1, -1]), r"t.jsonl, line 2: `output_token_ids` must be a list"),
        ({"prompt_token_ids": "x", "output_token_ids": []}, r"t.jsonl, line 2: `prompt_token_ids`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, second: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load_traces(jsonl(tmp_path / "t.jsonl", line([1, 2]), second))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 200_000, "t.jsonl, line 2: its values are nested too deeply"),
        (b'{"prompt_token_ids": [1], "category": "\xe9"}', "line 2: it is not text in UTF-8"),
        (b"\xff\xfe{\0}\0", "line 2: it is not text in UTF-8"),
        (b"9" * 5000, "line 2: it is not JSON"),
    ],
)
def test_a_line_that_cannot_be_parsed_is_named(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = jsonl(tmp_path / "t.jsonl", line([1, 2]))
    path.write_bytes(path.read_bytes() + content)
    with pytest.raises(TraceError, match=message):
        load_traces(path)


def test_a_byte_order_mark_and_separators_within_strings_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [line([1, 2], category="a\u2028b\u2029c\u0085d"), line([3, 4])]
    texts = [json.dumps(one, ensure_ascii=False) for one in lines]
    path.write_bytes("\ufeff{}\r\n{}\n".format(*texts).encode())
    first, second = load_traces(path).traces
    assert first.category == "a\u2028b\u2029c\u0085d" and second.output.tolist() == [3, 4]


def test_a_file_that_cannot_be_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    path = jsonl(tmp_path / "t.jsonl", line([1, 2]))
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(TraceError, match="cannot be read: Permission denied"):
        load_traces(path)


def test_generated_answers_recombine_the_outputs() -> None:
    rng = random.Random(0)
    outputs = [[rng.randrange(8) for _ in range(300)] for _ in range(5)]
    recorded = [trace(list(range(200)), output) for output in outputs]
    advances: list[int] = []
    made = resample(recorded, 2000, seed=1, advance=advances.append)
    assert sum(len(one.output) for one in made) == sum(advances) == 2000
    assert all(200 <= len(one.output) <= 300 for one in made[:-1])
    assert {len(one.prompt) for one in made} == {50}
    seen = {tuple(o[i : i + 3]) for o in outputs for i in range(298)}
    assert {
        tuple(o[i : i + 3]) for m in made if (o := m.output.tolist()) for i in range(98)
    } <= seen
    whole = {tuple(o[i : i + 20]) for o in outputs for i in range(281)}
    assert tuple(made[0].output[50:70].tolist()) not in whole
    again = resample(recorded, 2000, seed=1)
    assert all((a.output == b.output).all() for a, b in zip(made, again, strict=True))
    with_ends = resample([trace([1], [3, 4]), trace([1], [5, 6])], 500)  # dead ends at once
    assert sum(len(one.output) for one in with_ends) == 500
