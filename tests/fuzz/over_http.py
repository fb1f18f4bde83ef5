"""Plays rounds over HTTP: two real servers, the `openai` client, concurrent requests."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
from openai import APIError, APIStatusError, OpenAI
from transformers import AutoTokenizer

from lookahead_vllm.draft.registry import PROPOSERS
from lookahead_vllm.engine.worker.step_recorder import Counters
from tests.fuzz.play import Difference, Played
from tests.fuzz.round import Request, Round
from tests.support.http_answers import Answer, assembled, compared, draft_counters
from tests.support.models import save_tiny_model
from tests.support.parser_texts import FUNCTIONS
from tests.support.servers import cores_of, serve
from tests.support.tokenizer import save_tokenizer

ROOT = Path(__file__).resolve().parents[2]
CLIENT_PARAMETERS = ("n", "seed", "temperature", "top_p", "max_tokens", "stop", "presence_penalty")
"""Parameters of the `openai` client's methods; all others go into `extra_body`."""


class Servers:
    """Plays each round with a new pair of servers. No request is aborted.

    Each server has `ranks` tensor-parallel processes with disjoint cores.
    """

    def __init__(self, folder: Path, model: str | None, ranks: int = 1) -> None:
        self._folder = folder
        self._ranks = ranks
        if ranks > 1:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores_of(ranks)
        self._model = Path(model) if model else save_tokenizer(save_tiny_model("llama", folder))
        self._tokenizer = AutoTokenizer.from_pretrained(self._model)
        os.environ["PYTHONPATH"] = str(ROOT)  # servers import a logits processor from tests/

    def compare(self, round_: Round, clients: int = 8) -> Played:
        """Compare both servers; lookahead's answers are those to the second of two passes."""
        speculative = {"method": "lookahead", **round_.lookahead}
        if PROPOSERS[speculative["proposer"]].startswith("tests."):  # servers cannot load those
            speculative["proposer"] = "ngram_trie"
        settings = self._settings(round_)
        with (
            serve(self._model, self._folder / "plain.log", *_flags(settings)) as plain_url,
            serve(
                self._model,
                self._folder / "lookahead.log",
                *_flags({**settings, **round_.stress, "speculative_config": speculative}),
            ) as url,
            ThreadPoolExecutor(clients) as pool,
        ):
            plain, lookahead = (
                OpenAI(base_url=f"{u}/v1", api_key="none") for u in (plain_url, url)
            )

            def ask(client: OpenAI, batch: Sequence[Request]) -> list[Answer]:
                return list(pool.map(lambda request: self._ask(client, request), batch))

            expected = ask(plain, round_.requests)
            ask(lookahead, round_.requests)
            answers = ask(lookahead, round_.requests)
            drafted, accepted = draft_counters(requests.get(f"{url}/metrics", timeout=60).text)
            played = Played(answers, Counters(nodes=drafted, accepted_nodes=accepted))
            for i, request in enumerate(round_.requests):
                verdict, places = compared(expected[i], answers[i])
                played.refused += verdict == "refused by both"
                if verdict != "differs":
                    continue
                others = round_.requests[:i] + round_.requests[i + 1 :]
                again = (ask(plain, [request, *others[:n]])[0] for n in (0, 1, 2, 4, clients - 1))
                if any(compared(answer, answers[i])[0] != "differs" for answer in again):
                    played.ties += 1
                else:
                    difference = Difference(i, places[0], expected[i], answers[i])
                    played.differences.append(difference)
        return played

    def _settings(self, round_: Round) -> dict[str, Any]:
        settings = dict(round_.settings, dtype="float32", enforce_eager=True)
        settings.update(kv_cache_memory_bytes=256 << 20, served_model_name="m")
        settings["tensor_parallel_size"] = self._ranks
        if "custom_logits_processor" in round_.features:
            settings["logits_processors"] = "tests.support.processors:NoRepeat"
        if "priority scheduling" in round_.features:
            settings["scheduling_policy"] = "priority"
        return settings

    def _ask(self, client: OpenAI, request: Request) -> Answer:
        body = {k: v for k, v in request.params.items() if k in CLIENT_PARAMETERS}
        extra = {k: v for k, v in request.params.items() if k not in CLIENT_PARAMETERS}
        if (xargs := extra.pop("extra_args", None)) is not None:
            extra["vllm_xargs"] = xargs
        if request.structured is not None:
            kind, value = next(iter(request.structured.items()))
            if kind == "json_object":
                extra["response_format"] = {"type": "json_object"}
            else:
                extra["structured_outputs"] = {kind: value}
        if "logit_bias" in extra:
            extra["logit_bias"] = {str(k): v for k, v in extra["logit_bias"].items()}
        if request.salt is not None:
            extra["cache_salt"] = request.salt
        extra.update(priority=request.priority, return_token_ids=True)
        if request.chat:
            text = self._tokenizer.decode(request.prompt, skip_special_tokens=True)
            body["messages"] = [{"role": "user", "content": text}]
            if (count := extra.pop("logprobs", None)) is not None:
                extra.update(logprobs=True, top_logprobs=max(count, 0))
            if request.calls_tools:
                body["tools"] = [{"type": "function", "function": f} for f in FUNCTIONS]
            create: Any = client.chat.completions.create
        else:
            body["prompt"] = request.prompt
            create = client.completions.create
        try:
            answer = create(model="m", **body, stream=request.streamed, extra_body=extra)
            if request.streamed:
                return Answer(200, assembled([chunk.model_dump() for chunk in answer]))
            return Answer(200, answer.model_dump())
        except APIStatusError as error:
            return Answer(error.status_code, None, error.body)
        except APIError as error:
            return Answer(200, None, error.body)


def _flags(settings: dict[str, Any]) -> list[str]:
    flags = []
    for key, value in settings.items():
        flag = key.replace("_", "-")
        if value is True or value is False:
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags
