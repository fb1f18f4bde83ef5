"""Structured output on trees: valid, equal to plain vLLM's, with tokens that grammars dictate."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager

from lookahead_vllm.engine import grammar
from lookahead_vllm.engine.grammar import GrammarTreeWalk
from lookahead_vllm.engine.worker.v2.grammar_copies import GrammarCopies
from tests.support.driving import drafter_of, engine, generate, random_prompts
from tests.support.proposers import record

pytestmark = pytest.mark.usefixtures("runner")

HIDDEN = {"proposer": "hidden_path", "budget": 16}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "true": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["the", "thing", "man"]}, "maxItems": 3},
    },
    "required": ["name", "age", "true", "tags"],
    "additionalProperties": False,
}
REGEX = r"(the|in|an) [a-f]{2,6}: [0-9]{1,4}(\.[0-9]{2})?!"
CHOICES = ["the man is in", "the man is on", "nothing", "10, 10, 10"]
EBNF = 'root ::= "(" root ")" | item\nitem ::= [a-d]+ ("," item)?'

KINDS: dict[str, dict[str, Any]] = {
    "json": dict(json=SCHEMA),
    "regex": dict(regex=REGEX),
    "choice": dict(choice=CHOICES),
    "grammar": dict(grammar=EBNF),
    "json_object": dict(json_object=True),
}


def under(grammar: dict[str, Any] | None, seed: int | None, **extra: Any) -> SamplingParams:
    how = dict(temperature=0) if seed is None else dict(temperature=1.0, seed=seed)
    structured = StructuredOutputsParams(**grammar) if grammar else None
    return SamplingParams(**how, max_tokens=60, structured_outputs=structured, **extra)


def is_valid(kind: str, text: str) -> bool:
    if kind == "json":
        answer = json.loads(text)
        return answer.keys() == SCHEMA["properties"].keys() and isinstance(answer["age"], int)
    if kind == "json_object":
        return isinstance(json.loads(text), dict)
    if kind == "regex":
        return re.fullmatch(REGEX, text) is not None
    if kind == "choice":
        return text in CHOICES
    return re.fullmatch(r"\(*[a-d]+(,[a-d]+)*\)*", text) is not None


@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines"])
def test_every_backend_keeps_its_text_on_trees(backend: str, llama: Path) -> None:
    # lm-format-enforcer 0.11.3 imports a module that vLLM 0.32 does not have any more.
    kinds = tuple(KINDS) if backend != "outlines" else ("json", "regex", "choice")
    settings: dict[str, Any] = dict(
        skip_tokenizer_init=False, structured_outputs_config={"backend": backend}
    )
    params = [under(KINDS[k], s) for k in kinds for s in (None, 1, 2)]
    params += [under(None, None), under(None, 4)]
    prompts = random_prompts(len(params), 30, seed=71)
    with engine(llama, **settings) as plain:
        vanilla = generate(plain, prompts, params)
    record(prompts, vanilla)
    with engine(llama, HIDDEN, **settings) as llm:
        assert generate(llm, prompts, params) == vanilla
        counters = drafter_of(llm).counters
        assert counters.branching_trees > 10
        assert counters.accepted_nodes > 100
    tokenizer = AutoTokenizer.from_pretrained(llama)
    for kind, answers in zip([k for k in kinds for _ in range(3)], vanilla, strict=False):
        if answers[0][-1] == tokenizer.eos_token_id:
            assert is_valid(kind, tokenizer.decode(answers[0], skip_special_tokens=True))


@pytest.fixture
def compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's copies of grammars are compiled before the first token, on a busy machine too.

    V2 compiles them in the background.
    """
    start = GrammarCopies.start

    def start_and_wait(self: GrammarCopies, new: Any) -> None:
        start(self, new)
        request = self._requests.get(new.req_id)
        while request is not None and request.structured_output_request.grammar is None:
            time.sleep(0.001)

    monkeypatch.setattr(GrammarCopies, "start", start_and_wait)


@pytest.mark.usefixtures("compiled_at_once")
@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_tokens_that_the_grammar_dictates_are_drafted(backend: str, llama: Path) -> None:
    """Where it allows only one text, that text is drafted, up to the end of the request."""
    settings: dict[str, Any] = dict(
        skip_tokenizer_init=False, structured_outputs_config={"backend": backend}
    )
    forced = dict(regex=r"(x|y) the age is 100\.")
    params = [under(forced, s, ignore_eos=i) for s in (None, 1) for i in (False, True)]
    params += [under(KINDS["json"], None), under(KINDS["choice"], 3)]
    params += [under(forced, 4, n=2), under(forced, 5, min_tokens=20)]
    prompts = random_prompts(len(params), 30, seed=81)
    with engine(llama, **settings) as plain:
        vanilla = generate(plain, prompts, params)
    with engine(llama, {"proposer": "recorder"}, **settings) as llm:
        assert generate(llm, prompts[:1], params[:1]) == vanilla[:1]
        counters = drafter_of(llm).counters
        # All but the choice at the beginning, and one token a step.
        assert counters.accepted_nodes >= len(vanilla[0][0]) - 2 - counters.trees
        assert counters.trees <= 2
        off = under(forced, None, extra_args={"lookahead_enabled": False})
        before = counters.trees
        assert generate(llm, prompts[:1], off) == vanilla[:1]
        assert counters.trees == before
        assert generate(llm, prompts, params) == vanilla


def test_a_grammar_waits_for_the_end_of_reasoning(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the prompt, in a draft, or never; nodes after the end are masked, those before are not."""
    settings: dict[str, Any] = dict(
        skip_tokenizer_init=False,
        reasoning_parser="deepseek_r1",
        structured_outputs_config={"backend": "xgrammar"},
    )
    stop = 4
    params, prompts = [], []
    for i, prompt in enumerate(random_prompts(16, 20, seed=91)):
        seed = None if i % 2 else i
        params.append(under(KINDS["regex" if i % 3 else "choice"], seed, logit_bias={stop: i % 8}))
        prompts.append([*prompt, stop] if i in (3, 4) else prompt)
    with engine(llama, **settings) as plain:
        vanilla = generate(plain, prompts, params)
    assert sum(stop in answer[0] for answer in vanilla) > 4
    record(prompts, vanilla)
    with engine(llama, HIDDEN, **settings) as llm:
        assert generate(llm, prompts, params) == vanilla
        assert drafter_of(llm).counters.moved_tokens > 10
        # From 0.33 on, vLLM may forbid that the reasoning ends in a certain way.
        monkeypatch.setattr(
            StructuredOutputManager, "_masked_reasoning_ends", lambda *_: (stop,), raising=False
        )
        for prompt, [answer] in zip(prompts, generate(llm, prompts, params), strict=True):
            assert stop not in answer[1:] or stop in (prompt[-1], answer[0])


def test_grammars_survive_preemption_and_chunked_prompts(llama: Path) -> None:
    settings: dict[str, Any] = dict(skip_tokenizer_init=False)
    params = [under(KINDS[k], s) for k in KINDS for s in (None, 1)]
    prompts = random_prompts(len(params), 60, seed=95)
    with engine(llama, **settings) as plain:
        vanilla = generate(plain, prompts, params)
    record(prompts, vanilla)
    tight = dict(block_size=32, num_gpu_blocks_override=14)
    chunked = dict(max_num_batched_tokens=48, max_num_seqs=4)
    for extra in (tight, chunked):
        with engine(llama, HIDDEN, **settings, **extra) as llm:
            assert generate(llm, prompts, params) == vanilla


class _Request:
    """A request whose tokens are characters."""

    def __init__(self) -> None:
        self.all_token_ids: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class _Dictating:
    """An xgrammar matcher that allows one text; counts how often it is asked."""

    def __init__(self, text: str, request: _Request) -> None:
        self.text, self.request, self.asked = text, request, 0
        self.path: list[int] = []

    def find_jump_forward_string(self) -> str:
        self.asked += 1
        return self.text[self.request.num_tokens + len(self.path) :]


def test_a_long_dictated_text_is_asked_for_once() -> None:
    """To find a text of 100,000 characters takes 30 ms, which every step would pay."""
    request, text = _Request(), "".join(chr(97 + i * i % 26) for i in range(3000))
    matcher = _Dictating(text, request)
    walk: Any = object.__new__(GrammarTreeWalk)
    walk._request = request
    tokenizer = SimpleNamespace(decode=lambda tokens: "".join(map(chr, tokens)))
    walk._manager = SimpleNamespace(tokenizer=tokenizer)
    while request.num_tokens < len(text) - 40:
        for length in (0, 3):  # drafted nodes before the dictated ones
            matcher.path = [ord(c) for c in text[request.num_tokens :][:length]]
            expected = text[request.num_tokens + length :]
            assert walk._dictated_text(matcher, matcher.path) == expected
        request.all_token_ids += [ord(c) for c in text[request.num_tokens :][:37]]
    assert matcher.asked == 1
    request.all_token_ids[-1] = 0  # not what was dictated
    walk._dictated_text(matcher, [])
    assert matcher.asked == 2


def test_only_what_may_be_drafted_is_encoded(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    original = grammar._encoded

    def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
        encoded.append(text)
        return original(tokenizer, text)

    monkeypatch.setattr(grammar, "_encoded", encode)
    schema = {"const": "".join(chr(97 + i * i % 26) for i in range(2000))}
    params = [
        under({"json": schema}, None, extra_args=extra)
        for extra in (None, {"lookahead": {"enabled": False}})
    ]
    prompts = random_prompts(2, 30, seed=5)
    with engine(llama, skip_tokenizer_init=False) as plain:
        vanilla = generate(plain, prompts, params[:1] * 2)
    lookahead = {"proposer": "recorder", "num_speculative_tokens": 8}  # drafts nothing itself
    with engine(llama, lookahead, skip_tokenizer_init=False) as llm:
        assert generate(llm, prompts[1:], params[1:]) == vanilla[1:]
        assert not encoded  # without drafts, nothing is dictated
        assert generate(llm, prompts[:1], params[:1]) == vanilla[:1]
    assert encoded and max(map(len, encoded)) <= 8 * grammar.MAX_TOKEN_LENGTH
