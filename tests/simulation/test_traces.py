"""Recorded generations: read and filtered."""

from typing import Any

import pytest

from lookahead_vllm.simulation.traces import TraceError, load_traces
from tests.support.files import jsonl


def line(output: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": [1, 2], "output_token_ids": output, **more}


def test_traces_are_filtered_then_shuffled_then_limited(tmp_path):
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
        ("[1]", r"t.jsonl, line 2: an object with .* with `messages`, or"),
        ({"prompt_token_ids": [1]}, r"t.jsonl, line 2: `output_token_ids` must be a list"),
        (line([1, -1]), r"t.jsonl, line 2: `output_token_ids` must be a list"),
        ({"prompt_token_ids": "x", "output_token_ids": []}, r"t.jsonl, line 2: `prompt_token_ids`"),
        (line([1, 2], chains=[[[[1, 0]] * 4]]), r"t.jsonl, line 2: `chains` must have, for each"),
        (line([1, 2], chains=[1, 2]), r"t.jsonl, line 2: `chains` must have, for each"),
        ({"messages": []}, r"t.jsonl, line 2: a text needs the model's tokenizer; write --model"),
        ({"messages": 1}, r"t.jsonl, line 2: `messages` must be a list of objects"),
        ({"turns": 1}, r"t.jsonl, line 2: `turns` must be a list of objects"),
        ({"turns": [line([1]), {}]}, r"t.jsonl, line 2, turn 2: `prompt_token_ids` must be a list"),
    ],
)
def test_a_bad_line_is_named(tmp_path, second, message):
    with pytest.raises(TraceError, match=message):
        load_traces(jsonl(tmp_path / "t.jsonl", line([1, 2]), second))


def test_the_turns_of_a_session_are_prompted_with_those_before_them(tmp_path):
    turns = [
        {"prompt_token_ids": [1, 2], "output_token_ids": [3, 4]},
        {"prompt_token_ids": [5], "output_token_ids": [6], "category": "short"},
        {"prompt_token_ids": [7], "output_token_ids": [8, 9], "category": "b"},
    ]
    alone = line([10, 11])
    path = jsonl(tmp_path / "t.jsonl", {"turns": turns, "suite": "s", "category": "a"}, alone)
    file = load_traces(path)
    assert [one.prompt.tolist() for one in file.traces] == [[1, 2], list(range(1, 8)), [1, 2]]
    assert [one.output.tolist() for one in file.traces] == [[3, 4], [8, 9], [10, 11]]
    assert [one.category for one in file.traces] == ["s/a", "s/b", "all"]
    assert [[one.turn for one in session] for session in file.sessions] == [[0, 1], [0]]
    assert file.too_short == 1


class Letters:
    """A renderer with a token for each character of the contents, and 1 before an answer."""

    def text(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def chat(self, chat: Any, messages: Any, add_generation_prompt: bool) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += [1] * (message["role"] == "assistant") + self.text(message["content"], False)
        return ids + [1] * add_generation_prompt


def chat(*contents: str) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(contents)
    messages = zip(roles, contents, strict=False)
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def test_the_chats_of_a_folder_are_sessions_without_those_that_go_on(tmp_path, capsys):
    """As in a log of requests, where each comes with the whole conversation."""
    whole, branch = chat("hi", "yes", "and", "no!"), chat("hi", "yes", "but", "why")
    (tmp_path / "b").mkdir()
    jsonl(tmp_path / "a.jsonl", chat("hi", "yes"), whole, chat("hi"), line([7, 8]))
    jsonl(tmp_path / "b" / "c.jsonl", branch, whole, chat("alone"))
    jsonl(tmp_path / "b" / "not.json", "{")
    sessions = load_traces(tmp_path, renderer=Letters()).sessions
    found = [[bytes(turn.output.tolist()) for turn in session] for session in sessions]
    assert found == [[b"yes", b"no!"], [bytes([7, 8])], [b"yes", b"why"]]
    assert bytes(sessions[0][1].prompt.tolist()) == b"hi\1yesand\1"
    skipped = capsys.readouterr().err
    assert "c.jsonl, line 3: `messages` has no answer" in skipped
    assert "append the one of the reply, `choices[0].message`" in skipped
    with pytest.raises(TraceError, match=r"is left to replay: all lines were skipped"):
        load_traces(jsonl(tmp_path / "d.jsonl", chat("alone")), renderer=Letters())
    with pytest.raises(TraceError, match=r"a.jsonl, line 2: a text needs"):
        load_traces(tmp_path)


def test_no_more_chats_are_rendered_than_the_limit_needs(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "t.jsonl", *(chat(f"{i}", "yes") for i in range(9)))
    rendered, render = [], Letters.chat
    monkeypatch.setattr(
        Letters, "chat", lambda *args, **more: rendered.append(args) or render(*args, **more)
    )
    assert len(load_traces(path, limit=2, renderer=Letters()).traces) == 2
    few = len(rendered)
    load_traces(path, renderer=Letters())
    assert len(rendered) - few == 4.5 * few


def test_documents_and_answers_are_traces(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", {"prompt": "a", "response": "bc"}, {"text": "def"})
    traces = load_traces(path, renderer=Letters()).traces
    assert [(one.prompt.size, bytes(one.output.tolist())) for one in traces] == [
        (1, b"bc"),
        (0, b"def"),
    ]
