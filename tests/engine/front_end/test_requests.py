"""A request's options reach the proposer, and never change its output."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.entrypoints.launchers.api_server import entry
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from lookahead_vllm.engine.front_end import requests
from lookahead_vllm.engine.front_end.requests import with_early_check
from lookahead_vllm.options import request as request_options
from lookahead_vllm.options.request import parse_options
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.driving import GREEDY, drafter_of, engine, generate, random_prompts
from tests.support.models import save_adapter, save_tiny_model
from tests.support.proposers import Recorder
from tests.support.tokenizer import save_words

STARTED = Recorder.STARTED
LORA = dict(enable_lora=True, max_lora_rank=8, max_loras=2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer: token 7 is the word w7."""
    path = save_tiny_model("llama", tmp_path_factory.mktemp("front_end"))
    return save_words([f"w{i}" for i in range(128)], path, "w2", bos_token="w0", eos_token="w1")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    return save_adapter(tmp_path_factory.mktemp("lora") / "adapter-a", 1)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    STARTED.clear()
    yield


def ask(llm: LLM, extra_args: dict[str, Any] | None, salt: str | None = None, **kwargs: Any) -> Any:
    """Namespace and references that the proposer gets for each answer to one request."""
    lora = kwargs.pop("lora_request", None)
    settings = dict(max_tokens=3, temperature=0, detokenize=False, extra_args=extra_args)
    params = SamplingParams(**{**settings, **kwargs})
    before = deepcopy(extra_args)
    prompt = TokensPrompt(prompt_token_ids=[5, 6])
    if salt:
        prompt["cache_salt"] = salt
    STARTED.clear()
    llm.generate([prompt], params, lora_request=lora, use_tqdm=False)
    assert params.extra_args == before
    return [(namespace, references) for _, namespace, references in STARTED]


def test_the_proposer_gets_the_options_of_a_request(llama, adapter):
    recorder = {"proposer": "recorder"}
    with engine(llama, recorder, drafts=False, skip_tokenizer_init=False, **LORA) as llm:
        assert ask(llm, None) == [("", [])]
        assert ask(llm, {"lookahead_namespace": "n"}) == [('[null, null, "n"]', [])]
        assert ask(llm, None, salt="s") == [('[null, "s", null]', [])]
        nested = {"lookahead": {"namespace": "n", "reference": ["w7 w8", "w9"]}}
        everything = [('["adapter-a", "s", "n"]', [[7, 8], [9]])]
        assert ask(llm, nested, salt="s", lora_request=adapter) == everything
        assert ask(llm, {"lookahead_reference": "w7 w8"}) == [("", [[7, 8]])]
        assert ask(llm, {"lookahead": {"reference": [[7, 8], "w9", ""]}}) == [("", [[7, 8], [9]])]
        for seed in (None, 3):
            started = ask(llm, nested, salt="s", n=2, temperature=0.8, seed=seed)
            assert started == [('[null, "s", "n"]', [[7, 8], [9]])] * 2
        assert ask(llm, {"lookahead": {"enabled": False}}) == []
        assert ask(llm, {"lookahead_enabled": 0, "lookahead_reference": "w7"}) == []
        assert ask(llm, None, max_tokens=1) == []
        assert not drafter_of(llm).proposer.outputs


@pytest.mark.parametrize(("share", "namespace"), [("none", None), ("all", "")])
def test_the_server_decides_which_requests_share(share, namespace, llama):
    recorder = {"proposer": "recorder", "budget": 16, "share": share}
    with engine(llama, recorder, drafts=False) as llm:
        assert ask(llm, None) == [(namespace, [])]
        assert ask(llm, {"lookahead_namespace": "n"}, salt="s") == [(namespace, [])]
        # This engine has no tokenizer.
        assert ask(llm, {"lookahead_reference": [7, 8]}) == [(namespace, [[7, 8]])]
        with pytest.raises(VLLMValidationError, match=r"no tokenizer .* write its token ids"):
            ask(llm, {"lookahead_reference": "w7 w8"})
        # A bad request among good ones.
        core = llm.llm_engine
        prompt = TokensPrompt(prompt_token_ids=[5, 6])
        core.add_request("good", prompt, GREEDY)
        with pytest.raises(VLLMValidationError, match="did you mean 'lookahead_enabled'"):
            bad = SamplingParams(extra_args={"lookahead_enable": 1})
            core.add_request("bad", prompt, bad)
        outputs = []
        while core.has_unfinished_requests():
            outputs += core.step()
        assert [o.request_id for o in outputs if o.finished] == ["good"]
        assert [list(outputs[-1].outputs[0].token_ids)] == generate(llm, [[5, 6]])[0]


def test_references_and_adapters_never_change_the_text(llama, adapter):
    prompts = random_prompts(6, 30)
    adapters = [None, adapter] * 3
    noise = random_prompts(6, 60, seed=1)

    def answers(llm: LLM, references: list[list[int]] | None = None) -> list[list[int]]:
        params = [deepcopy(GREEDY) for _ in prompts]
        for i, reference in enumerate(references or ()):
            params[i].extra_args = {"lookahead": {"reference": reference}}
        inputs = [TokensPrompt(prompt_token_ids=p) for p in prompts]
        outputs = llm.generate(inputs, params, lora_request=adapters, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    with engine(llama, **LORA) as plain:
        vanilla = answers(plain)
        # An engine without lookahead leaves the arguments as they are.
        untouched = {"lookahead": "anything", "lookahead_x": 1}
        processed = plain.llm_engine.input_processor.process_inputs(
            "id",
            TokensPrompt(prompt_token_ids=[5]),
            SamplingParams(extra_args=untouched),
            ("generate",),
        )
        assert processed.sampling_params.extra_args == untouched
    truths = [prompt[-4:] + answer for prompt, answer in zip(prompts, vanilla, strict=True)]
    with engine(llama, {"budget": 16}, **LORA) as llm:
        assert answers(llm, noise) == vanilla
        assert answers(llm, truths) == vanilla
        assert answers(llm, truths[1:] + truths[:1]) == vanilla


class Client:
    """Stands in for `AsyncLLM`; its tokenizer makes one token of each character."""

    def __init__(self, **options: Any) -> None:
        speculation = SimpleNamespace(lookahead_options=LookaheadOptions(**options))
        self.vllm_config = SimpleNamespace(speculative_config=speculation)
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 128)
        self.renderer = SimpleNamespace(
            tokenizer=object(), tokenize_prompts_async=self._tokenize_prompts_async
        )
        self.calls: list[tuple[str, Any]] = []
        self.tokenized: list[list[str]] = []

    async def _tokenize_prompts_async(self, prompts: list[dict], params: Any) -> list[dict]:
        assert not params.add_special_tokens and params.max_total_tokens is None
        self.tokenized.append([prompt["prompt"] for prompt in prompts])
        await asyncio.sleep(0)
        return [{"prompt_token_ids": [len(p["prompt"])] * len(p["prompt"])} for p in prompts]

    @with_early_check
    async def generate(self, prompt: str, params: Any, request_id: str) -> AsyncIterator[int]:
        self.calls.append((prompt, params.extra_args))
        try:
            for i in range(3):
                yield i
        finally:
            self.calls.append(("closed", None))


async def first_output(client: Client, params: SamplingParams) -> int:
    outputs = client.generate("hello", params, request_id="r")
    async for output in outputs:
        await outputs.aclose()
        return output
    raise AssertionError


def test_a_stream_is_refused_before_it_starts():
    """AsyncLLM.generate checks when it is called, and tokenizes before vLLM sees the request."""
    client = Client()
    with pytest.raises(VLLMValidationError):
        client.generate("hello", SamplingParams(extra_args={"lookahead_x": 1}), request_id="r")
    assert not client.calls

    params = SamplingParams(extra_args={"lookahead_reference": ["abc", "de"], "other": 1})
    assert asyncio.run(first_output(client, params)) == 0
    (prompt, extra_args), closed = client.calls
    assert prompt == "hello" and closed[0] == "closed"
    references = [np.frombuffer(r, "<i4").tolist() for r in extra_args["lookahead"].references]
    assert extra_args["other"] == 1 and references == [[3, 3, 3], [2, 2]]
    assert params.extra_args == {"lookahead_reference": ["abc", "de"], "other": 1}

    client.calls.clear()
    client.vllm_config.speculative_config = None
    assert asyncio.run(first_output(client, params)) == 0
    assert client.calls[0][1] is params.extra_args


def test_the_references_of_a_request_with_many_prompts_are_tokenized_once():
    client = Client()

    async def all_prompts(reference: str) -> list[int]:
        params = SamplingParams(extra_args={"lookahead_reference": reference})
        return await asyncio.gather(*(first_output(client, params) for _ in range(9)))

    for reference in ("abc", "abc", "de"):  # nothing is kept
        assert asyncio.run(all_prompts(reference)) == [0] * 9
    assert client.tokenized == [["abc"], ["abc"], ["de"]]
    ids = [extra_args["lookahead"].references for _, extra_args in client.calls if extra_args]
    assert len(ids) == 27 and [len(np.frombuffer(*i, "<i4")) for i in ids] == [3] * 18 + [2] * 9


def test_each_answer_of_a_request_costs_a_copy_of_its_texts():
    given = {"lookahead_reference": [[1, 2]], request_options.TOOL_RESULTS: ("a",)}
    few, many = (SamplingParams(n=n, extra_args=given) for n in (64, 65))
    server = LookaheadOptions()
    assert requests._options(Client(), server, few).spellings
    with pytest.raises(VLLMValidationError, match="n=65, but each answer gets a copy of them"):
        requests._options(Client(), server, many)
    del given["lookahead_reference"]
    many = SamplingParams(n=65, extra_args=given)
    assert not requests._options(Client(), server, many).spellings


def test_a_text_is_measured_by_its_bytes_not_its_tokens(monkeypatch):
    """300,000 bytes of Chinese count as 75,000 tokens; this tokenizer makes 100,000 of them."""
    text = "漢" * 100_000
    params = SamplingParams(extra_args={"lookahead_reference": text})
    monkeypatch.setattr(request_options, "MAX_REFERENCE_TOKENS", 75_000)
    client = Client()
    assert asyncio.run(first_output(client, params)) == 0
    options = client.calls[0][1]["lookahead"]
    assert len(options.references[0]) == 4 * 100_000
    assert parse_options(client.calls[0][1], 128, LookaheadOptions()) is options
    monkeypatch.setattr(request_options, "MAX_REFERENCE_TOKENS", 74_999)
    with pytest.raises(VLLMValidationError, match="75000 tokens"):
        Client().generate("hello", params, request_id="r")


@pytest.fixture(scope="module")
def endpoints() -> TestClient:
    """The endpoints of vLLM's server, with no engine behind them."""
    requests.install()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--enable-scale-out"])
    return TestClient(entry.build_app(args, ("generate",)), raise_server_exceptions=False)


MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions/batch", {"messages": [MESSAGES]}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"model": "m", "max_tokens": 3, "messages": MESSAGES}),
        ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {}}),
        ("/invocations", {"prompt": "Hello"}),
    ],
)
def test_every_endpoint_refuses_an_option_that_it_would_ignore(endpoint, body, endpoints):
    wrong = endpoints.post(endpoint, json={**body, "lookahead_enabled": False})
    assert wrong.status_code == 400
    assert "'lookahead_enabled' was given at the top" in wrong.json()["error"]["message"]
    right = endpoints.post(endpoint, json=body)
    assert "has no attribute" in right.text  # the engine's


def test_endpoints_still_refuse_what_is_no_json(endpoints):
    for kind, says in (("application/json", "JSON decode error"), ("text/plain", "Unsupported")):
        refused = endpoints.post("/invocations", content=b"{", headers={"content-type": kind})
        assert refused.status_code == 400 and says in refused.text
