"""A stream that a parser reads is plain vLLM's, chunk by chunk, whatever a step accepts."""

import json
import random
import re
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
from prometheus_client import REGISTRY
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.outputs import STREAM_FINISHED, CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from lookahead_vllm.engine.front_end import streams
from tests.support.models import save_config
from tests.support.parser_texts import (
    CHAT_TEMPLATE_KWARGS,
    FUNCTIONS,
    RESPONSE_TEMPLATE,
    THINKING_FORMATS,
    TOOL_FORMATS,
    reasoning_texts,
    special_tokens,
    tool_texts,
)
from tests.support.scripted_core import NODES, Script, Server, scripted_server
from tests.support.tokenizer import CHAT_TEMPLATE

END = 1
TOOL_PARSERS = [name for row in TOOL_FORMATS for name in row.names.split()]
REASONING_PARSERS = [name for row in THINKING_FORMATS for name in row.names.split()]
BOTH = {*TOOL_PARSERS} & {*REASONING_PARSERS}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TEMPLATE = {"chat_template_kwargs": CHAT_TEMPLATE_KWARGS}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: dict(
        messages=[{"role": "user", "content": "hi"}],
        tools=[{"type": "function", "function": function} for function in FUNCTIONS],
        **USAGE,
        **TEMPLATE,
    ),
    RESPONSES: dict(input="hi", tools=[{"type": "function", **f} for f in FUNCTIONS]),
    MESSAGES: dict(
        messages=[{"role": "user", "content": "hi"}],
        tools=[{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS],
    ),
}
LIMIT = {RESPONSES: "max_output_tokens"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and one for each marker of the parsers."""
    pieces = ["<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    tokens.add_tokens(special_tokens())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        response_template=RESPONSE_TEMPLATE,
    )


@pytest.fixture(scope="module")
def server(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = save_config("llama", tmp_path_factory.mktemp("streams"))
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 4096}))
    tokenizer.save_pretrained(model)
    with scripted_server(model) as server:
        yield server


def bursts(ids: list[int], seed: int) -> list[list[int]]:
    """`ids` as steps with drafts emit them: the first token alone, then up to nine at once."""
    rng = random.Random(seed)
    steps, left = [ids[:1]], ids[1:]
    while left:
        size = rng.randint(1, 9)
        steps.append(left[:size])
        left = left[size:]
    return steps


def check(
    server: Server, ids: list[int], path: str = CHAT, limit: int = 1000, **options: Any
) -> None:
    """A stream of `ids` and an end has the same events in two kinds of bursts as in plain vLLM."""
    body = {**BODIES[path], LIMIT.get(path, "max_tokens"): limit, **options}
    body = {key: value for key, value in body.items() if value is not None}
    ids = [*ids, END]
    plain = server.stream(path, Script([[token] for token in ids], END), body)
    for steps in (bursts(ids, 1), [ids[:1], ids[1:]]):
        assert server.stream(path, Script(steps, END), body) == plain


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("tool", name) for name in TOOL_PARSERS),
        *(("reasoning", name) for name in REASONING_PARSERS),
    ],
)
def test_parsers(server, tokenizer, kind, name):
    server.configure(**{kind: name})
    texts = tool_texts(name) if kind == "tool" else reasoning_texts(name)
    options = {} if kind == "tool" else {"tools": None}
    for text in texts.values():
        check(server, tokenizer.encode(text, add_special_tokens=False), **options)
    ids = tokenizer.encode(next(iter(texts.values())), add_special_tokens=False)
    for thirds in (1, 2):  # cut by max_tokens
        check(server, ids, limit=len(ids) * thirds // 3, **options)


@pytest.mark.parametrize(
    ("reasoning", "tool"),
    [(name, name) for name in sorted(BOTH)] + [("deepseek_r1", "hermes"), ("granite", "xlam")],
)
def test_both_parsers(server, tokenizer, reasoning, tool):
    server.configure(tool, reasoning)
    text = reasoning_texts(reasoning)["thinking and answer"] + tool_texts(tool)["one call"]
    check(server, tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("path", "options"),
    [
        (CHAT, dict(logprobs=True, top_logprobs=2)),
        (CHAT, dict(stop=['"zone'])),
        (CHAT, dict(stop=['"zone'], include_stop_str_in_output=True)),
        (CHAT, dict(n=2)),
        (CHAT, dict(stream_interval=4)),
        (CHAT, dict(return_token_ids=True)),
        (CHAT, dict(tool_choice="required")),
        (RESPONSES, {}),
        (RESPONSES, dict(limit=20)),
        (MESSAGES, {}),
        (MESSAGES, dict(limit=20)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["xlam", "deepseek_v31"])
def test_endpoints_and_options(server, tokenizer, path, options, name):
    server.configure(tool=name)
    text = tool_texts(name)["two calls"]
    check(server, tokenizer.encode(text, add_special_tokens=False), path=path, **options)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_stream_without_a_parser_keeps_its_bursts(server, tokenizer, path):
    """Of an endpoint that has none, beside one that has; and of a server without parsers."""
    server.configure(tool=None if path == CHAT else "xlam")
    body = dict(USAGE, max_tokens=100)
    body |= dict(prompt="hi") if path != CHAT else dict(messages=BODIES[CHAT]["messages"])
    ids = [*tokenizer.encode("a stream of some words"), END]
    chunks = [
        len(server.stream(path, Script(steps, END), body))
        for steps in ([[token] for token in ids], bursts(ids, 1))
    ]
    assert chunks[0] - chunks[1] == len(ids) - len(bursts(ids, 1))


@pytest.mark.parametrize(
    "options", [{}, dict(stop=["zone"]), dict(max_tokens=20), dict(n=2)], ids=str
)
def test_metrics_are_those_of_steps(server, tokenizer, options):
    """Whether a parser reads the stream or not."""
    ids = [*tokenizer.encode("the time zone of a stream of some words"), END]
    steps = bursts(ids, 1)

    def counted(tool: str | None) -> dict[str, float]:
        server.configure(tool=tool)
        before = metrics()
        body = dict(messages=BODIES[CHAT]["messages"], max_tokens=100) | options
        server.stream(CHAT, Script(steps, END), body)
        return {name: value - before[name] for name, value in metrics().items()}

    parsed = counted("hermes")
    assert parsed == pytest.approx(counted(None))
    if not options:
        assert parsed["vllm:generation_tokens_total"] == len(ids)
        assert parsed["vllm:inter_token_latency_seconds_count"] == len(steps) - 1
        assert parsed["vllm:inter_token_latency_seconds_sum"] == len(steps) - 1


def metrics() -> Counter[str]:
    """vLLM's metrics, without times of the real clock: the script has a clock of its own."""
    real_time = re.compile(
        "(time_to_first_token|e2e_request_latency)_seconds_(sum|bucket)|_created"
    )
    totals: Counter[str] = Counter()
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("vllm:") and not real_time.search(sample.name):
                totals[sample.name + sample.labels.get("le", "")] += sample.value
    return totals


DETAILS = re.compile(r',"completion_tokens_details":({[^}]*}|null)')


@pytest.mark.parametrize(
    "options",
    [{}, dict(n=2), dict(max_tokens=20), dict(stop=["ted"]), dict(stop=["was"])],
    ids=str,
)
def test_usage_says_how_much_of_a_prediction_was_accepted(server, tokenizer, options):
    """Parsed or not, streamed or not; nothing else of the answer changes."""
    body = dict(messages=BODIES[CHAT]["messages"], max_tokens=100) | options
    predicted = body | {"prediction": {"type": "content", "content": "a text"}}
    ids = [*tokenizer.encode("a text that was predicted"), END][: body["max_tokens"]]
    steps, n = bursts(ids, 1), options.get("n", 1)
    last = len(steps) - 1
    if options.get("stop") == ["was"]:
        last = next(i for i, size in enumerate(accumulate(map(len, steps))) if size >= 15)
        assert last < len(steps) - 1
    accepted = n * sum(len(step) - 1 for step in steps[: last + 1])
    rejected = n * NODES * last - accepted
    expected = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    for tool in (None, "hermes"):
        server.configure(tool=tool)
        for usage in ({}, USAGE):
            ask = server.stream if usage else server.answer
            lines = [ask(CHAT, Script(steps, END), one | usage) for one in (predicted, body)]
            answer, plain = map("\n".join, lines)
            assert json.loads(DETAILS.findall(answer)[-1]) == {"reasoning_tokens": 0, **expected}
            assert DETAILS.sub("", answer) == DETAILS.sub("", plain)


def parsed_collector() -> Any:
    from vllm.v1.engine.output_processor import RequestOutputCollector

    collector = streams.collecting_tokens(RequestOutputCollector)(RequestOutputKind.DELTA, "a")
    collector.is_parsed = True
    return collector


def outputs_of(num_tokens: int) -> Iterator[RequestOutput]:
    """Of two answers, whose last tokens come with more than their text."""
    prompt = [5]
    for i in range(num_tokens):
        completion = CompletionOutput(i % 2, f" word {i}", [1000 + i], None, None)
        if i >= num_tokens - 2:
            completion.finish_reason = "stop"
        if i % 1000 == 999:
            completion.token_ids, completion.logprobs = [7, 8], [{7: None}, {8: None}]
        yield RequestOutput("a", None, prompt, None, [completion], i == num_tokens - 1)
    yield STREAM_FINISHED


def test_a_slow_reader_gets_the_same_and_takes_little_memory():
    """A token takes 175 bytes; as an output, 612."""
    collector, num_tokens = parsed_collector(), 20_000
    tracemalloc.start()
    for output in outputs_of(num_tokens):
        collector.put(output)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 300 * num_tokens
    for expected in outputs_of(num_tokens):
        output = collector.get_nowait()
        parts = zip(output.outputs, expected.outputs, strict=True)
        for one, other in [(output, expected), *parts]:
            assert {**vars(one), "outputs": 0} == {**vars(other), "outputs": 0}
    assert output is STREAM_FINISHED and collector.get_nowait() is None


def test_an_error_overtakes_the_tokens_that_wait():
    collector = parsed_collector()
    for text in "abc":
        completion = CompletionOutput(0, text, [1], None, None)
        collector.put(RequestOutput("a", None, [5], None, [completion], False))
    assert collector.get_nowait().outputs[0].text == "a"
    collector.put(ValueError("the engine is dead"))
    with pytest.raises(ValueError, match="dead"):
        collector.get_nowait()
    assert collector.get_nowait() is None
