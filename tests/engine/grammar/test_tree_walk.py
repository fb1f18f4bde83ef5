"""Structured output on trees: valid, equal to plain vLLM's, with tokens that grammars dictate."""

import functools
import json
import re
from types import SimpleNamespace
from typing import Any

import llguidance
import llguidance.hf
import pytest
import torch
import xgrammar
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from lookahead_vllm.draft.tree import EMPTY_TREE, DraftTree
from lookahead_vllm.engine.grammar.tree_walk import GrammarTreeWalk
from tests.support.driving import (
    drafter_of,
    engine,
    generate,
    grown_forests,
    random_prompts,
    record_plain,
)
from tests.support.models import TINY, WANDERING, save_config
from tests.support.smollm2 import SMOLLM2

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


def with_grammars(backend: str, **settings: Any) -> dict[str, Any]:
    """Settings of an engine."""
    settings["structured_outputs_config"] = {"backend": backend}
    return dict(skip_tokenizer_init=False, **settings)


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
def test_every_backend_keeps_its_text_on_trees(backend, llama):
    # lm-format-enforcer 0.11.3 imports a module that vLLM 0.32 does not have any more.
    kinds = tuple(KINDS) if backend != "outlines" else ("json", "regex", "choice")
    settings = with_grammars(backend)
    params = [under(KINDS[k], s) for k in kinds for s in (None, 1, 2)]
    params += [under(None, None), under(None, 4)]
    prompts = random_prompts(len(params), 30, seed=71)
    vanilla = record_plain(llama, prompts, params, **settings)
    with engine(llama, HIDDEN, **settings) as llm:
        assert generate(llm, prompts, params) == vanilla
        counters = drafter_of(llm).counters
        assert counters.branching_trees > 10
        assert counters.accepted_nodes > 100
    tokenizer = AutoTokenizer.from_pretrained(llama)
    for kind, answers in zip([k for k in kinds for _ in range(3)], vanilla, strict=False):
        if answers[0][-1] == tokenizer.eos_token_id:
            assert is_valid(kind, tokenizer.decode(answers[0], skip_special_tokens=True))


@pytest.mark.usefixtures("compiled_at_once")
@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_tokens_that_the_grammar_dictates_are_drafted(backend, llama):
    """Where it allows only one text, that text is drafted, up to the end of the request."""
    settings = with_grammars(backend)
    forced = dict(regex=r"(x|y) the age is 100\.")
    params = [under(forced, s, ignore_eos=i) for s in (None, 1) for i in (False, True)]
    params += [under(KINDS["json"], None), under(KINDS["choice"], 3)]
    params += [under(forced, 4, n=2), under(forced, 5, min_tokens=20)]
    prompts = random_prompts(len(params), 30, seed=81)
    vanilla = record_plain(llama, prompts, params, **settings)
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


def test_a_grammar_waits_for_the_end_of_reasoning(llama, monkeypatch):
    """In the prompt, in a draft, or never; nodes after the end are masked, those before are not."""
    settings = with_grammars("xgrammar", reasoning_parser="deepseek_r1")
    stop = 4
    params, prompts = [], []
    for i, prompt in enumerate(random_prompts(16, 20, seed=91)):
        seed = None if i % 2 else i
        params.append(under(KINDS["regex" if i % 3 else "choice"], seed, logit_bias={stop: i % 8}))
        prompts.append([*prompt, stop] if i in (3, 4) else prompt)
    vanilla = record_plain(llama, prompts, params, **settings)
    assert sum(stop in answer[0] for answer in vanilla) > 4
    with engine(llama, HIDDEN, **settings) as llm:
        assert generate(llm, prompts, params) == vanilla
        assert drafter_of(llm).counters.moved_tokens > 10
        # From 0.33 on, vLLM may forbid that the reasoning ends in a certain way.
        monkeypatch.setattr(
            StructuredOutputManager, "_masked_reasoning_ends", lambda *_: (stop,), raising=False
        )
        for prompt, [answer] in zip(prompts, generate(llm, prompts, params), strict=True):
            assert stop not in answer[1:] or stop in (prompt[-1], answer[0])


def test_grammars_survive_preemption_and_chunked_prompts(llama):
    settings: dict[str, Any] = dict(skip_tokenizer_init=False)
    params = [under(KINDS[k], s) for k in KINDS for s in (None, 1)]
    prompts = random_prompts(len(params), 60, seed=95)
    vanilla = record_plain(llama, prompts, params, **settings)
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


NON_ASCII = {
    "key": ('root ::= "{\\"姓名\\": \\"" [a-z]* "\\"}"', '{"姓名": "ab"}'),
    "one text": ('root ::= "🧿 yes"', "🧿 yes"),
    "two characters": ('root ::= "\\"饕餮\\""', '"饕餮"'),
    "characters with common bytes": ('root ::= "饕餮!" | "饕餕?"', "饕餮!"),
    "the replacement character": (
        'root ::= "a\N{REPLACEMENT CHARACTER}bc"',
        "a\N{REPLACEMENT CHARACTER}bc",
    ),
}
"""Grammars, and a text that each allows; SmolLM2 has several tokens for most of the characters."""


@functools.cache
def _smollm2() -> Any:
    return AutoTokenizer.from_pretrained(SMOLLM2)


@functools.cache
def _guidance_tokenizer() -> Any:
    return llguidance.hf.from_tokenizer(_smollm2(), len(_smollm2()))


@functools.cache
def _compiler() -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(_smollm2()))


class _Constrained(_Request):
    """A request under a grammar, without an engine."""

    def __init__(self, backend: str, ebnf: str) -> None:
        super().__init__()
        self.request_id = "request"
        self.rows = 0
        """How many masks were allocated."""
        self.grammar: Any
        self._num_words = -(-len(_smollm2()) // 32)
        if backend == "xgrammar":
            compiled = _compiler().compile_grammar(ebnf)
            matcher = xgrammar.GrammarMatcher(compiled)
            self.grammar = XgrammarGrammar(len(_smollm2()), matcher, compiled)
        else:
            tokenizer = _guidance_tokenizer()
            text = llguidance.grammar_from("grammar", ebnf)
            self.grammar = GuidanceGrammar(
                llguidance.LLMatcher(tokenizer, text), tokenizer, len(_smollm2())
            )
        self.structured_output_request = SimpleNamespace(grammar=self.grammar)

    def emit(self, tokens: list[int]) -> None:
        assert self.grammar.accept_tokens(self.request_id, tokens)
        self.all_token_ids += tokens

    def walk(self, chain: list[int] | None = None, max_nodes: int = 64) -> GrammarTreeWalk:
        tree = DraftTree.from_lists(chain, range(-1, len(chain) - 1)) if chain else EMPTY_TREE
        manager: Any = SimpleNamespace(
            backend=SimpleNamespace(allocate_token_bitmask=self._allocate),
            tokenizer=_smollm2(),
            _get_constraint_bounds=lambda *_: SimpleNamespace(constraint_start=0),
        )
        return GrammarTreeWalk(manager, self, tree, max_nodes, max_nodes)

    def _allocate(self, rows: int) -> torch.Tensor:
        self.rows += rows
        return torch.full((rows, self._num_words), -1, dtype=torch.int32)

    def allowed(self) -> list[int]:
        """The mask of the next token."""
        mask = torch.full((1, self._num_words), -1, dtype=torch.int32)
        if not self.grammar.is_terminated():
            self.grammar.fill_bitmask(mask, 0)
        return mask[0].tolist()


def _check(request: _Constrained, tree: DraftTree) -> None:
    """The draft is a chain that the grammar allows, and gets the masks of its nodes."""
    tokens = tree.tokens.tolist()
    assert tree.parents.tolist() == list(range(-1, len(tokens) - 1))
    masks = request.walk(tokens).masks()
    assert len(masks) == 1 + len(tokens)
    for i, token in enumerate(tokens):
        assert masks[i].tolist() == request.allowed()
        assert request.grammar.validate_tokens([token]) == [token]
        assert request.grammar.accept_tokens("", [token])
    assert masks[-1].tolist() == request.allowed()
    if tokens:
        request.grammar.rollback(len(tokens))


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
@pytest.mark.parametrize("case", NON_ASCII)
def test_a_draft_may_end_inside_a_character(backend, case):
    """xgrammar cannot name the text that follows then; other steps draft it."""
    ebnf, text = NON_ASCII[case]
    tokens = _smollm2().encode(text, add_special_tokens=False)
    request = _Constrained(backend, ebnf)
    for root in range(len(tokens)):
        before = request.allowed()
        for leaf in range(root, len(tokens)):
            tree = request.walk(tokens[root:leaf]).run()
            assert tree.tokens.tolist()[: leaf - root] == tokens[root:leaf]
            _check(request, tree)
            assert request.allowed() == before
        request.emit(tokens[root : root + 1])


def test_masks_are_allocated_for_the_nodes_that_are_drafted():
    """64 masks of a large vocabulary take longer than the rest of the walk."""
    request = _Constrained("xgrammar", 'root ::= [a-z]+ "!" | "1 and the rest"')
    assert not len(request.walk().run()) and request.rows == 1
    chain = _smollm2().encode("abc", add_special_tokens=False)
    request.rows = 0
    assert len(request.walk(chain).run()) == len(chain) and request.rows == 1 + len(chain)
    request.emit(_smollm2().encode("1", add_special_tokens=False))
    request.rows = 0
    tree = request.walk().run()
    assert _smollm2().decode(tree.tokens) == " and the rest"
    assert 2 + len(tree) == request.rows  # one at first, then all of them


def test_what_is_forbidden_leaves_its_room_to_what_is_dictated():
    request = _Constrained("xgrammar", 'root ::= "the man is in"')
    chain = _smollm2().encode("a guess without the grammar", add_special_tokens=False)
    tree = request.walk(chain, max_nodes=len(chain)).run()
    assert _smollm2().decode(tree.tokens) == "the man is in"
    _check(request, tree)


def test_a_walk_that_fails_leaves_the_grammar_where_it_was(monkeypatch):
    request = _Constrained("xgrammar", 'root ::= "the man is in"')
    chain = _smollm2().encode("the man is", add_special_tokens=False)
    fill, before = GrammarTreeWalk._fill_mask, request.allowed()
    for fails_at in (0, len(chain) - 1, len(chain)):  # a node of the draft, and a dictated one

        def fail(self: GrammarTreeWalk, node: int, fails_at: int = fails_at) -> None:
            if node == fails_at:
                raise RuntimeError
            fill(self, node)

        monkeypatch.setattr(GrammarTreeWalk, "_fill_mask", fail)
        with pytest.raises(RuntimeError):
            request.walk(chain).run()
        assert request.allowed() == before
        assert request.grammar.num_processed_tokens == 0


@pytest.mark.usefixtures("compiled_at_once")
@pytest.mark.parametrize("max_step_nodes", [0, 8])
def test_what_grammars_dictate_is_within_the_nodes_of_a_step(llama, max_step_nodes):
    regex = "the name and the number of the person is [0-9]{3}"
    params = SamplingParams(
        temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(regex=regex)
    )
    lookahead = {"proposer": "ngram_trie", "num_speculative_tokens": 32, "budget": 32}
    drafts = max_step_nodes > 0
    with engine(llama, lookahead, drafts, skip_tokenizer_init=False) as llm:
        drafter_of(llm).max_step_nodes = max_step_nodes
        forests = grown_forests(llm)
        generate(llm, random_prompts(12, 20, seed=3), params)
    nodes = [forest.num_nodes for forest in forests]
    assert max(nodes) <= max_step_nodes and any(nodes) is drafts


NON_ASCII_PARAMS: list[dict[str, Any]] = [
    dict(
        json={
            "type": "object",
            "properties": {"姓名": {"enum": ["饕餮", "饕餕"]}, "a": {"type": "boolean"}},
            "required": ["姓名", "a"],
            "additionalProperties": False,
        }
    ),
    dict(choice=["🧿 yes"]),
    dict(regex="(饕餮|姓名): [0-9]{2}, 🧿🧿"),
]


@pytest.mark.usefixtures("compiled_at_once")
def test_grammars_with_characters_of_several_tokens(tmp_path):
    wide = {"llama": TINY["llama"] | {"vocab_size": len(_smollm2())}}
    model = save_config("llama", tmp_path, wide)
    settings: dict[str, Any] = dict(
        load_format=WANDERING,
        tokenizer=str(SMOLLM2),
        skip_tokenizer_init=False,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )
    params = [under(g, s) for g in NON_ASCII_PARAMS for s in (None, 1)]
    prompts = [_smollm2().encode(f"Answer {i}:") for i in range(len(params))]
    vanilla = record_plain(model, prompts, params, **settings)
    lookahead = {"proposer": "recorder", "num_speculative_tokens": 4}  # drafts nothing itself
    with engine(model, lookahead, **settings) as llm:
        assert generate(llm, prompts, params) == vanilla
        assert drafter_of(llm).counters.accepted_nodes > 10
