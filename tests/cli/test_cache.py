"""`lookahead-vllm cache`: the first request gets drafts from learned texts; bad texts are named."""

import argparse
import copy
import os
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi
from transformers import LlamaConfig
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import safe_apply_chat_template

from lookahead_vllm.cli import cache as command
from lookahead_vllm.cli.cache import main, make_proposer
from lookahead_vllm.cli.main import main as main_command
from lookahead_vllm.cli.server_renderer import ServerRenderer
from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.draft.cache.warming import TextError, check_texts, read_texts
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.stepping import read
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.drafting import draft
from tests.support.files import jsonl
from tests.support.tokenizer import save_tokenizer, save_words

WORDS = ["[UNK]", "<user>", "<bot>", "<end>", *(f"w{i}" for i in range(60))]
SENTENCE = " ".join(f"w{i}" for i in range(20))
CHAT = "{% for m in messages %}<{{m.role}}> {{m.content}} <end> {% endfor %}"
CHAT += "{% if messages[0].content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
CHAT += "{% if add_generation_prompt %}<bot>{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights; the tokens of its tokenizer are words."""
    chat = CHAT.replace("<{{m.role}}>", "{{'<bot>' if m.role[0]=='a' else '<user>'}}")
    folder = save_words(WORDS, tmp_path_factory.mktemp("model"), "[UNK]", chat_template=chat)
    save_config(folder)
    return folder


def save_config(folder: Path) -> None:
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(folder)


@pytest.fixture(scope="module")
def renderer(model: Path) -> ServerRenderer:
    return ServerRenderer(str(model))


@pytest.fixture(scope="module")
def tokenizer(renderer: ServerRenderer) -> Any:
    return renderer.tokenizer


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def texts(path: Path, renderer: ServerRenderer) -> list[tuple[list[int], list[int]]]:
    check_texts(path)
    found = read_texts(path, renderer, skip=pytest.fail)
    return [(text.prompt, text.answer) for text in found if text.answer]


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
def test_every_kind_of_line_is_an_answer_after_its_prompt(line, expected, tmp_path, renderer):
    path = jsonl(tmp_path / "a.jsonl", line)
    assert texts(path, renderer) == [(ids(before), ids(answer)) for before, answer in expected]


def test_an_answer_in_a_log_of_requests_is_learned_once(tmp_path, renderer):
    turns = [{"role": role, "content": f"w{i}"} for i in range(3) for role in ("user", "assistant")]
    log = jsonl(tmp_path / "a.jsonl", *({"messages": turns[:end]} for end in (1, 2, 4, 4, 6)))
    answers = [answer for _, answer in texts(log, renderer)]
    assert answers == [ids(f"w{i} <end>") for i in range(3)]


def test_a_file_of_another_kind_is_one_document(tmp_path, renderer):
    (tmp_path / "a.md").write_text("\ufeffw1 w2\n\nw3\n", encoding="utf-8")
    assert texts(tmp_path / "a.md", renderer) == [([], ids("w1 w2 w3"))]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "w1"}\n{"text": 3}\n', "a.jsonl, line 2: an object with `text`"),
        ("\n{w1\n", "line 2: it is not JSON"),
        ('{"output_token_ids": [1, -1]}\n', "`output_token_ids` must be a list of token ids"),
        ('{"output_token_ids": [1], "prompt_token_ids": "w1"}\n', "`prompt_token_ids` must be"),
        ('{"messages": "w1"}\n', "`messages` must be a list of objects"),
        ('{"messages": [{"role": 1}]}\n', "`messages` must be a list of objects with a `role`"),
        ('{"messages": [{"role": "user", "content": 1}]}\n', "`content` that is a text, a list"),
        (b"\xff\xfe\n", "is not text in UTF-8"),
        ('{"text": "w1 \\ud800"}\n', r"line 1: its text has half of a surrogate pair, \ud800"),
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant"}]}\n',
            r"line 1: its text has half of a surrogate pair, \ud800",
        ),
    ],
)
def test_a_wrong_text_is_named_with_its_line(content, message, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TextError) as error:
        check_texts(path)
    assert message in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value)


# ---- chats, as a server renders them ------------------------------------------------------------

ROLES = "{% for m in messages %}<{{ m.role }}>{% if m.reasoning %}{{ m.reasoning }}, {% endif %}"
ROLES += "{{ m.content }}"
CALLS = "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}"
TOOLS = "{% if tools %}<tools>{{ tools[0].function.name }}</tools>{% endif %}"
END = "</s>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
THINKING = PROMPT.replace("<assistant>", "<assistant><think>")

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": 1, "by": [2]}'},
}
CALLED = '<call>{"name": "look", "arguments": {"at": 1, "by": [2]}}</s>\n'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.fixture(scope="module")
def chat_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServerRenderer]:
    """Models that differ in what their prompts end with; a token is a character."""
    renderers = {}
    for name, prompt in {"plain": PROMPT, "thinking": THINKING}.items():
        folder = save_tokenizer(tmp_path_factory.mktemp(name))
        (folder / "chat_template.jinja").write_text(TOOLS + ROLES + CALLS + END + prompt)
        save_config(folder)
        renderers[name] = ServerRenderer(str(folder))
    return renderers


@pytest.mark.parametrize("name", ["plain", "thinking"])
@pytest.mark.parametrize(
    ("answer", "learned"),
    [
        ({"content": None, "tool_calls": [CALL]}, CALLED),
        ({"content": "on it", "tool_calls": [CALL]}, "on it" + CALLED),
        ({"content": "so", "tool_calls": [], "reasoning": "hm"}, "hm, so</s>\n"),
        ({"content": PARTS}, "one\ntwo</s>\n"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no</s>\n"),
    ],
)
def test_an_answer_is_the_end_of_the_chat_that_vllm_renders(
    answer, learned, name, tmp_path, chat_models
):
    renderer = chat_models[name]
    messages = [
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": PARTS},
        {"role": "assistant", **answer},
    ]
    path = jsonl(tmp_path / "a.jsonl", {"messages": messages, "tools": [TOOL], "model": "x"})
    ((prompt, ids),) = texts(path, renderer)
    assert renderer.tokenizer.decode(ids) == learned
    assert prompt == rendered_by_vllm(renderer, messages[:2], add_generation_prompt=True)
    assert rendered_by_vllm(renderer, messages, add_generation_prompt=False)[-len(ids) :] == ids


def rendered_by_vllm(
    renderer: ServerRenderer, messages: list[Any], add_generation_prompt: bool
) -> list[int]:
    """What vLLM's chat endpoint makes of the messages."""
    conversation, _, _ = parse_chat_messages(
        copy.deepcopy(messages), renderer.model_config, content_format="string"
    )
    return safe_apply_chat_template(
        renderer.model_config,
        renderer.tokenizer,
        conversation,
        tools=[TOOL],
        add_generation_prompt=add_generation_prompt,
    )


def test_a_line_that_vllm_refuses_is_named_and_skipped(model, tmp_path, tokenizer, capsys):
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
    custom = [{"id": "1", "type": "custom", "custom": {"name": "w1", "input": "w2"}}]
    path = jsonl(
        tmp_path / "a.jsonl",
        {"text": "w1 w2 w3 w4"},
        chat([image], "w9"),
        chat("bad", "w9"),
        chat("w5", None, tool_calls=custom),
        {"messages": [{"role": "user", "content": "w1"}]},
        chat("w5", "w6 w7 w8"),
    )
    out = tmp_path / "warm.cache"
    assert main(["build", "--model", str(model), "--texts", str(path), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "8 tokens of 2 texts learned" in printed.out and "(skipped lines: 4)" in printed.out
    skipped = [line for line in printed.err.splitlines() if line.startswith("skipped: ")]
    for line, number, reason in zip(
        skipped,
        range(2, 6),
        ("is not a multimodal model", "no bad words", "of type 'function'", "has no answer"),
        strict=True,
    ):
        assert f"{path}, line {number}: " in line and reason in line
    assert drafted(out, tokenizer, "w6 w7")[:1] == ids("w8")


def chat(question: Any, answer: Any, **more: Any) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer, **more},
        ]
    }


# ---- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "has no such model"),
        (ConnectionError("no route to the hub"), "no route to the hub"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_a_misspelt_model_is_told_before_anything_is_loaded(
    error, reason, tmp_path, capsys, monkeypatch
):
    def repo_exists(self: HfApi, name: str) -> bool:
        if error is None:
            return False
        raise error

    monkeypatch.setattr(HfApi, "repo_exists", repo_exists)
    monkeypatch.setattr(command, "load_renderer", pytest.fail)
    text = tmp_path / "a.txt"
    text.write_text(SENTENCE)
    for model, why in {
        "my/modle": reason,
        "./modle": "Repo id must use",
        "x" * 300: "",
    }.items():
        with pytest.raises(SystemExit):
            main(["build", "--model", model, "--texts", str(text), "--out", str(tmp_path / "c")])
        said = capsys.readouterr().err.splitlines()[-1]
        assert f"--model: {model} is no folder" in said and why in said


def drafted(cache: Path, tokenizer: Any, output: str, namespace: str = "") -> list[int]:
    """The first branch that a server with this file drafts after `output`, in its first request."""
    arrays, facts = cache_file.load(cache, cache_file.fingerprint(tokenizer.get_vocab()))
    sizes = {"max_nodes": len(arrays["edges"]), "budget": 16}
    proposer = NGramTrieProposer(LookaheadOptions(share=facts["share"], **sizes))
    proposer.restore(arrays, facts)
    proposer.start("first", [], namespace)
    read(proposer, {"first": ids(output)})
    return draft(proposer, "first", may_branch=False).tokens.tolist()


@pytest.fixture
def cache(model: Path, tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(SENTENCE)
    out = tmp_path / "warm.cache"
    options = ["--texts", str(tmp_path / "a.txt"), "--out", str(out), "--max-nodes", "8192"]
    assert main(["build", "--model", str(model), *options]) == 0
    return out


def test_the_first_request_gets_drafts_from_the_file(cache, tokenizer):
    assert drafted(cache, tokenizer, "w3 w4 w5")[:4] == ids("w6 w7 w8 w9")
    assert drafted(cache, tokenizer, "w3 w4 w5", "other") == []


@pytest.mark.parametrize("add", [False, True])
def test_prompts_are_inserted_whole(add, cache, tokenizer, monkeypatch):
    """In a server this has 2 ms a step; here are no steps, and the rest would be left out."""
    monkeypatch.setattr("lookahead_vllm.draft.insertion.MAX_SECONDS", 0.0)
    fingerprint = cache_file.fingerprint(tokenizer.get_vocab())
    options = argparse.Namespace(add=add, out=cache, max_nodes=None if add else 8192)
    proposer = make_proposer(options, fingerprint)
    proposer.start("r", [*range(1000, 1150), 1100, 1101])
    assert draft(proposer).tokens[:4].tolist() == [1102, 1103, 1104, 1105]


def test_add_extends_the_file_and_keeps_its_ngrams(cache, model, tokenizer):
    more = jsonl(cache.with_name("b.jsonl"), {"prompt": "w50", "response": "w51 w52 w53"})
    options = ["build", "--model", str(model), "--texts", str(more), "--out", str(cache), "--add"]
    assert main([*options, "--namespace", "team-a"]) == 0
    assert drafted(cache, tokenizer, "w3 w4 w5")[:1] == ids("w6")
    assert drafted(cache, tokenizer, "w51 w52") == []
    # The engine's namespace of requests with this lookahead_namespace.
    assert drafted(cache, tokenizer, "w51 w52", '[null, null, "team-a"]')[:1] == ids("w53")


@pytest.mark.parametrize(("share", "namespace"), [("all", ""), ("namespace", '[null, null, "a"]')])
def test_add_learns_what_requests_of_that_server_share(share, namespace, cache, model, tokenizer):
    fingerprint = cache_file.fingerprint(tokenizer.get_vocab())
    arrays, facts = cache_file.load(cache, fingerprint)
    cache_file.save(cache, arrays, {**facts, "share": share}, fingerprint)
    more = jsonl(cache.with_name("b.jsonl"), {"prompt": "w50", "response": "w51 w52 w53"})
    options = ["build", "--model", str(model), "--texts", str(more), "--out", str(cache), "--add"]
    assert main([*options, "--namespace", "a"]) == 0
    assert drafted(cache, tokenizer, "w51 w52", namespace)[:1] == ids("w53")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("build", "the following arguments are required: --model, --texts, --out"),
        (
            "build --model {model} --texts {text} {there}/no --out {there}/c",
            "there is no file {there}/no",
        ),
        ("build --model {there} --texts {text} --out {there}/c", "vLLM cannot load the config"),
        ("build --model {model} --texts {ids} --out {there}/c", "{ids} has token 64, and the tok"),
        (
            "build --model {model} --texts {text} --out {there}/no/c",
            "there is no folder {there}/no",
        ),
        ("build --model {model} --texts {text} --out {text}", "a.txt exists; write --add"),
        (
            "build --model {model} --texts {text} --out {there}/c --max-nodes 9",
            "max_nodes=9 was given",
        ),
        (
            "build --model {model} --texts {text} --out {cache} --add --max-nodes 4096",
            "has 8192, which --add keeps",
        ),
        (
            "build --model {model} --texts {text} --out {text} --add",
            "a.txt: it is damaged, or not a cache of this release of lookahead",
        ),
    ],
)
def test_a_wrong_command_line_gets_one_sentence(given, message, cache, model, capsys):
    places = dict(model=model, there=cache.parent, text=cache.with_name("a.txt"), cache=cache)
    places["ids"] = jsonl(cache.with_name("ids.jsonl"), {"output_token_ids": [64]})
    before = sorted(cache.parent.iterdir())
    with pytest.raises(SystemExit) as error:
        main([part.format(**places) for part in given.split()])
    assert error.value.code == 2
    error_line = capsys.readouterr().err.splitlines()[-1]
    assert error_line.startswith("lookahead-vllm cache build: error: ")
    assert message.format(**places) in error_line
    assert sorted(cache.parent.iterdir()) == before


def test_ctrl_c_writes_nothing(model, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(SENTENCE)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(NGramTrieProposer, "draft", interrupt)
    monkeypatch.setattr(NGramTrieProposer, "_compile", lambda self: None)
    options = ["--texts", str(tmp_path / "a.txt"), "--out", str(tmp_path / "c")]
    assert main_command(["cache", "build", "--model", str(model), *options]) == 130
    assert os.listdir(tmp_path) == ["a.txt"]
