"""`lookahead-vllm cache`: the first request gets drafts from learned texts; bad texts are named."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lookahead_vllm.cli.cache import load_tokenizer, main, make_proposer, restored
from lookahead_vllm.cli.main import main as main_command
from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.draft.cache.warming import TextError, read_texts
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.proposer import DraftLimits
from lookahead_vllm.draft.trie.namespaces import digest_of
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer
from tests.support.smollm2 import SMOLLM2

WORDS = ["[UNK]", "<user>", "<bot>", "<end>", *(f"w{i}" for i in range(60))]
SENTENCE = " ".join(f"w{i}" for i in range(20))
CHAT = "{% for m in messages %}<{{m.role}}> {{m.content}} <end> {% endfor %}"
CHAT += "{% if messages[0].role is not string %}{{ raise_exception('no role') }}{% endif %}"
CHAT += "{% if add_generation_prompt %}<bot>{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer whose tokens are words."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = CHAT.replace("<{{m.role}}>", "{{'<bot>' if m.role[0]=='a' else '<user>'}}")
    folder = tmp_path_factory.mktemp("model")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(model)


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def texts(path: Path, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    return [(text.prompt, text.answer) for text in read_texts(path, tokenizer) if text.answer]


# ---- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"text": "w1 w2"}, [("", "w1 w2")]),
        ({"prompt": "w1", "response": "w2 w3"}, [("w1", "w2 w3")]),
        ({"prompt": "w1", "completion": "w2 w3"}, [("w1", "w2 w3")]),
        ({"output_token_ids": ids("w1 w2")}, [("", "w1 w2")]),
        (
            {"prompt_token_ids": ids("w5"), "output_token_ids": ids("w1 w2"), "loops": False},
            [("w5", "w1 w2")],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "w1"},
                    {"role": "assistant", "content": "w2"},
                    {"role": "user", "content": "w3"},
                    {"role": "assistant", "content": "w4 w5"},
                ]
            },
            [
                ("<user> w1 <end> <bot>", "w2 <end>"),
                ("<user> w1 <end> <bot> w2 <end> <user> w3 <end> <bot>", "w4 w5 <end>"),
            ],
        ),
    ],
)
def test_every_kind_of_line_is_an_answer_after_its_prompt(
    line: Any, expected: list[tuple[str, str]], tmp_path: Path, tokenizer: Any
) -> None:
    path = write(tmp_path / "a.jsonl", line)
    assert texts(path, tokenizer) == [(ids(before), ids(answer)) for before, answer in expected]


def test_a_file_of_another_kind_is_one_document(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.md").write_text("\ufeffw1 w2\n\nw3\n", encoding="utf-8")
    assert texts(tmp_path / "a.md", tokenizer) == [([], ids("w1 w2 w3"))]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "w1"}\n{"text": 3}\n', "a.jsonl, line 2: an object with `text`"),
        ("\n{w1\n", "line 2: it is not JSON"),
        ('{"output_token_ids": [1, -1]}\n', "`output_token_ids` must be a list of token ids"),
        ('{"output_token_ids": [1], "prompt_token_ids": "w1"}\n', "`prompt_token_ids` must be"),
        ('{"output_token_ids": [64]}\n', "a token id is above 63, the tokenizer's last"),
        ('{"messages": "w1"}\n', "`messages` must be a list of objects"),
        ('{"messages": [{"role": "user", "content": "w1"}]}\n', "none of the role `assistant`"),
        (
            '{"messages": [{"role": 1}, {"role": "assistant"}]}\n',
            "the chat template refuses it: no role",
        ),
        (b"\xff\xfe\n", "is not text in UTF-8"),
        ('{"text": "w1 \\ud800"}\n', r"line 1: its text has half of a surrogate pair, \ud800"),
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant"}]}\n',
            r"line 1: its text has half of a surrogate pair, \ud800",
        ),
    ],
)
def test_a_wrong_text_is_named_with_its_line(
    content: str | bytes, message: str, tmp_path: Path, tokenizer: Any
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TextError) as error:
        list(read_texts(path, tokenizer))
    assert message in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value)


# ---- the command --------------------------------------------------------------------------------


def drafted(cache: Path, tokenizer: Any, output: str, namespace: str = "") -> list[int]:
    """The first branch that a server with this file drafts after `output`, in its first request."""
    arrays, facts = cache_file.load(cache, cache_file.fingerprint(tokenizer.get_vocab()))
    proposer = NGramTrieProposer(LookaheadOptions(max_nodes=len(arrays["edges"]), budget=16))
    proposer.restore(arrays, facts)
    proposer.start("first", [], namespace)
    proposer.extend({"first": ids(output)})
    (tree,) = proposer.propose([DraftLimits("first", 16, 16, may_branch=False)])
    return tree.tokens.tolist()


@pytest.fixture
def cache(model: Path, tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(SENTENCE)
    out = tmp_path / "warm.cache"
    options = ["--texts", str(tmp_path / "a.txt"), "--out", str(out), "--max-nodes", "8192"]
    assert main(["build", "--model", str(model), *options]) == 0
    return out


def test_the_first_request_gets_drafts_from_the_file(cache: Path, tokenizer: Any) -> None:
    assert drafted(cache, tokenizer, "w3 w4 w5")[:4] == ids("w6 w7 w8 w9")
    assert drafted(cache, tokenizer, "w3 w4 w5", "other") == []


@pytest.mark.parametrize("add", [False, True])
def test_prompts_are_inserted_whole(
    add: bool, cache: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a server this has 2 ms a step; here are no steps, and the rest would be left out."""
    monkeypatch.setattr("lookahead_vllm.draft.insertion.MAX_SECONDS", 0.0)
    fingerprint = cache_file.fingerprint(tokenizer.get_vocab())
    options = argparse.Namespace(add=add, out=cache, max_nodes=None if add else 8192)
    proposer = make_proposer(options, fingerprint)
    proposer.start("r", [*range(1000, 1150), 1100, 1101])
    assert proposer.propose([DraftLimits("r", 64, 64)])[0].tokens[:4].tolist() == [
        1102,
        1103,
        1104,
        1105,
    ]


def test_the_summary_counts_tokens_and_ngrams(
    cache: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.unlink()
    options = ["--texts", str(cache.with_name("a.txt")), "--out", str(cache)]
    assert main(["build", "--model", str(model), *options, "--max-nodes", "8192"]) == 0
    printed = capsys.readouterr().out
    assert "20 tokens of 1 texts learned in" in printed and "n-grams of at most 8192" in printed
    assert "pruned" not in printed
    assert cache.stat().st_mode & 0o777 == 0o600


def test_add_extends_the_file_and_keeps_its_ngrams(
    cache: Path, model: Path, tokenizer: Any
) -> None:
    more = write(cache.with_name("b.jsonl"), {"prompt": "w50", "response": "w51 w52 w53"})
    options = ["build", "--model", str(model), "--texts", str(more), "--out", str(cache), "--add"]
    assert main([*options, "--namespace", "team-a"]) == 0
    assert drafted(cache, tokenizer, "w3 w4 w5")[:1] == ids("w6")
    assert drafted(cache, tokenizer, "w51 w52") == []
    # The engine's namespace of requests with this lookahead_namespace.
    assert drafted(cache, tokenizer, "w51 w52", '[null, null, "team-a"]')[:1] == ids("w53")


def test_info_prints_the_contents_of_a_file(
    cache: Path, model: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["info", str(cache)]) == 0
    plain = capsys.readouterr().out
    held = cache_file.count_ngrams(cache_file.load(cache)[0])
    for part in (
        "intact",
        cache_file.fingerprint(tokenizer.get_vocab()),
        f"n-grams     {held} of at most 8192",
        f"{digest_of('')}  {held:>10} n-grams   (the one without a name)",
    ):
        assert part in plain


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("build", "the following arguments are required: --model, --texts, --out"),
        ("", "are required: COMMAND"),
        (
            "build --model {model} --texts {text} {there}/no --out {there}/c",
            "there is no file {there}/no",
        ),
        ("build --model {there} --texts {text} --out {there}/c", "no tokenizer could be loaded"),
        (
            "build --model {model} --texts {text} --out {there}/no/c",
            "there is no folder {there}/no",
        ),
        ("build --model {model} --texts {text} --out {there}", "{there} is a folder"),
        ("build --model {model} --texts {text} --out {text}", "a.txt exists; write --add"),
        (
            "build --model {model} --texts {text} --out {text} --add",
            "it is not a cache of lookahead",
        ),
        ("build --model {model} --texts {text} --out {there}/c --add", "c: No such file"),
        (
            "build --model {model} --texts {text} --out {there}/c --max-nodes 9",
            "max_nodes=9 was given",
        ),
        (
            "build --model {model} --texts {text} --out {cache} --add --max-nodes 4096",
            "has 8192, which --add keeps",
        ),
        ("info {text}", "a.txt: it is not a cache of lookahead"),
        ("info {there}/no", "no: No such file"),
    ],
)
def test_a_wrong_command_line_gets_one_sentence(
    given: str, message: str, cache: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = dict(model=model, there=cache.parent, text=cache.with_name("a.txt"), cache=cache)
    before = sorted(cache.parent.iterdir())
    with pytest.raises(SystemExit) as error:
        main([part.format(**places) for part in given.split()])
    assert error.value.code == 2
    command = " ".join(["lookahead-vllm cache", *given.split()[:1]])
    error_line = capsys.readouterr().err.splitlines()[-1]
    assert error_line.startswith(f"{command}: error: ")
    assert message.format(**places) in error_line
    assert sorted(cache.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, f: f.update(suffixes=[1, 2]), "it holds n-grams of other lengths"),
        (lambda a, f: f.update(share="odd"), "it was made with options that this release"),
        (lambda a, f: a.update(edges=a["edges"].astype(float)), "its edges are (dtype('float64')"),
        (lambda a, f: a.pop("trials"), "its trials are None, where"),
        (lambda a, f: a.pop("edges"), "its edges are missing"),
    ],
)
@pytest.mark.parametrize("command", ["info", "build"])
def test_a_file_that_does_not_fit_this_release_gets_one_sentence(
    command: str,
    change: Any,
    message: str,
    cache: Path,
    model: Path,
    tokenizer: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrays, facts = cache_file.load(cache)
    change(arrays, facts)
    monkeypatch.setattr(cache_file, "spaces_of", lambda rows: np.zeros(len(rows)))
    cache_file.save(cache, arrays, facts, cache_file.fingerprint(tokenizer.get_vocab()))
    given = [command, str(cache)]
    if command == "build":
        texts = ["--texts", str(cache.with_name("a.txt")), "--out", str(cache), "--add"]
        given = [command, "--model", str(model), *texts]
    with pytest.raises(SystemExit) as error:
        main(given)
    assert error.value.code == 2
    error_line = capsys.readouterr().err.splitlines()[-1]
    assert f"error: {cache}: it" in error_line and message in error_line


def test_info_prints_names_that_cannot_be_encoded(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays, facts = cache_file.load(cache)
    cache_file.save(cache, arrays, {**facts, "namespaces": {"\ud800": 1}}, "a\udfffb")
    capsys.readouterr()
    assert main_command(["cache", "info", str(cache)]) == 0
    printed = capsys.readouterr().out
    assert r"tokenizer   a\udfffb" in printed and r"\ud800" in printed


def test_ctrl_c_writes_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(SENTENCE)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(NGramTrieProposer, "extend", interrupt)
    monkeypatch.setattr(NGramTrieProposer, "_compile", lambda self: None)
    options = ["--texts", str(tmp_path / "a.txt"), "--out", str(tmp_path / "c")]
    assert main_command(["cache", "build", "--model", str(model), *options]) == 130
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.model
def test_a_real_tokenizers_chats_and_documents(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
    ]
    path = write(tmp_path / "a.jsonl", *[{"messages": chat}] * 3, {"text": "Paris is a city. " * 9})
    out = tmp_path / "warm.cache"
    given = ["build", "--model", str(SMOLLM2), "--max-nodes", "65536"]
    assert main([*given, "--texts", str(path), "--out", str(out)]) == 0
    tokenizer = load_tokenizer(str(SMOLLM2))
    arrays, facts = cache_file.load(out, cache_file.fingerprint(tokenizer.get_vocab()))
    proposer = restored(arrays, facts)
    proposer.start("r", [])
    proposer.extend({"r": tokenizer.encode("The capital of")})
    (tree,) = proposer.propose([DraftLimits("r", 16, 16, may_branch=False)])
    assert tokenizer.decode(tree.tokens).startswith(" France is Paris.<|im_end|>")
