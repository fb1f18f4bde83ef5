"""What one round of the fuzzer does, drawn from its number alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.registry import HAVE_WINDOW
from lookahead_vllm.draft.tree import UNKNOWN

VOCAB = 128
SPECIAL = 5
"""Token ids below are special, see tests/support/tokenizer.py."""
THINK, END_OF_THINKING = 3, 4
REFERENCE_LENGTHS = (1, 20, 100, 900)

Draw = Callable[[random.Random], dict[str, Any]]


@dataclass
class Request:
    """One request; `params` are keyword arguments of `SamplingParams`."""

    prompt: list[int]
    params: dict[str, Any]
    structured: dict[str, Any] | None = None
    adapter: int | None = None
    priority: int = 0
    arrival: int = 0
    """The engine step before which it is sent."""
    abort_after: int | None = None
    streamed: bool = False
    chat: bool = False
    """Over HTTP: as the message of a chat."""
    features: set[str] = field(default_factory=set)
    namespace: str | None = None
    salt: str | None = None
    references: list[list[int] | int] = field(default_factory=list)
    """Token ids, or the number of a request whose answer it is."""
    embedded: list[bool] | None = None
    """The places of the prompt that are sent as embeddings."""
    noise: int | None = None
    """The seed of these, where they are not those of the prompt's tokens."""

    @property
    def known_prompt(self) -> list[int]:
        """The prompt, as far as it is token ids: none where all are embeddings."""
        if self.embedded is None:
            return self.prompt
        if all(self.embedded):
            return []
        return [UNKNOWN if e else t for t, e in zip(self.prompt, self.embedded, strict=True)]


@dataclass
class Tenant:
    """Requests that share answers, unless they have other adapters."""

    namespace: str | None
    salt: str | None
    words: range
    """The tokens of their prompts."""
    prefix: list[int]


@dataclass
class Round:
    """A model, two engines over it, and what both are asked.

    Attributes
    ----------
    settings
        Engine arguments of both engines.
    stress
        Those of the lookahead engine alone: they must not change a text.
    lookahead
        The speculative config.
    """

    model: str
    settings: dict[str, Any]
    stress: dict[str, Any]
    lookahead: dict[str, Any]
    requests: list[Request]
    features: set[str]


SCHEMAS: list[dict[str, Any]] = [
    dict(
        json={
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "age": {"type": "integer"},
                "true": {"type": "boolean"},
            },
            "required": ["name", "age", "true"],
            "additionalProperties": False,
        }
    ),
    dict(regex=r"(the|in|an) [a-f]{2,6}: [0-9]{1,4}(\.[0-9]{2})?!"),
    dict(choice=["the man is in", "the man is on", "nothing", "10, 10, 10"]),
    dict(grammar='root ::= "(" root ")" | item\nitem ::= [a-d]+ ("," item)?'),
    dict(json_object=True),
]


def _ids(rng: random.Random, most: int) -> list[int]:
    return rng.sample(range(SPECIAL, VOCAB), rng.randint(1, most))


def _text(rng: random.Random) -> str:
    return rng.choice(["the", "in", "an", '": ', "true", "q", "z", "!", " ", "ab", "\n"])


REQUEST_FEATURES: dict[str, tuple[float, Draw]] = {
    "top_k": (0.2, lambda r: dict(top_k=r.choice([1, 3, 20]))),
    "top_p": (0.2, lambda r: dict(top_p=r.choice([0.3, 0.8, 0.95]))),
    "min_p": (0.15, lambda r: dict(min_p=r.choice([0.02, 0.2]))),
    "repetition_penalty": (0.12, lambda r: dict(repetition_penalty=r.choice([0.8, 1.1, 1.6]))),
    "presence_penalty": (0.12, lambda r: dict(presence_penalty=r.choice([-0.8, 0.5, 1.5]))),
    "frequency_penalty": (0.12, lambda r: dict(frequency_penalty=r.choice([-0.3, 0.2, 1.0]))),
    "logit_bias": (0.12, lambda r: dict(logit_bias={t: r.uniform(-9, 5) for t in _ids(r, 6)})),
    "allowed_token_ids": (0.08, lambda r: dict(allowed_token_ids=[1, *_ids(r, 60)])),
    "bad_words": (0.12, lambda r: dict(bad_words=[_text(r) + _text(r), _text(r), "th"])),
    "min_tokens": (0.12, lambda r: dict(min_tokens=r.choice([1, 5, 20]))),
    "stop_token_ids": (0.12, lambda r: dict(stop_token_ids=_ids(r, 5))),
    "stop": (
        0.15,
        lambda r: dict(
            stop=[_text(r) for _ in range(2)], include_stop_str_in_output=r.random() < 0.5
        ),
    ),
    "ignore_eos": (0.4, lambda r: dict(ignore_eos=True)),
    "ban": (0.3, lambda r: dict(extra_args={"ban": r.uniform(0.5, 9)})),
    # For all or none: plain vLLM can leave the state of an ended request to one without a budget.
    "thinking_token_budget": (1.0, lambda r: dict(thinking_token_budget=r.randint(0, 24))),
    "logprobs": (0.25, lambda r: dict(logprobs=r.choice([0, 1, 5, -1]))),
    "prompt_logprobs": (0.08, lambda r: dict(prompt_logprobs=r.choice([0, 3]))),
    "logprob_token_ids": (0.3, lambda r: dict(logprob_token_ids=_ids(r, 5))),
}
"""Each with its chance, where the round has it at all."""

ONLY_IN_SOME_ROUNDS = {
    "ban": "custom_logits_processor",
    "thinking_token_budget": "thinking",
    "logprob_token_ids": "chosen_logprobs",
}


def draw_round(
    seed: str,
    models: list[str],
    text: list[int] | None = None,
    http: bool = False,
    second_runner: bool = False,
) -> Round:
    """The round that this seed stands for, always the same.

    Parameters
    ----------
    text
        Token ids that prompts are cut from, for a model that is none of the tiny ones.
    http
        Both engines are servers.
    second_runner
        Plain vLLM's runner is the second one, which takes other logits processors than the first.
    """
    rng = random.Random(seed)
    model = rng.choice(models)
    features = {f"model {model}"}

    def has(feature: str, chance: float) -> bool:
        if rng.random() < chance:
            features.add(feature)
            return True
        return False

    settings: dict[str, Any] = dict(
        max_model_len=rng.choice([96, 256]), max_logprobs=-1, block_size=32
    )
    if has("logprobs_mode", 0.5):
        settings["logprobs_mode"] = rng.choice(
            ["raw_logits", "processed_logprobs", "processed_logits"]
        )
    has("custom_logits_processor", 0.0 if second_runner else 0.25)
    lora = model == "llama" and not http and has("lora", 0.7)
    if lora:
        settings.update(enable_lora=True, max_loras=2, max_lora_rank=8)
    # Beside adapters, vLLM's own embedding layer does not take a part of a step's tokens.
    if not (http or lora or second_runner) and has("prompt embeddings", 0.35):
        settings["enable_prompt_embeds"] = True
    if has("structured output", 0.5):
        # With embeddings, the tokenizer has one token more, and guidance no room for it.
        backends = ["xgrammar", "xgrammar", "guidance"]
        backend = rng.choice(backends[:2] if "prompt embeddings" in features else backends)
        features.add(f"structured output, {backend}")
        settings["structured_outputs_config"] = {"backend": backend}
        # The second runner's masks have no room for a tokenizer with more tokens than the model.
        if text is None and not second_runner and has("structured output after reasoning", 0.2):
            settings["reasoning_parser"] = "deepseek_r1"
    has("chosen_logprobs", 0.15)

    stress: dict[str, Any] = dict(max_num_seqs=rng.choice([1, 3, 16]))
    if has("preemption", 0.2):
        # Enough for one request of full length, in models with two KV groups too.
        blocks = settings["max_model_len"] // 32 * 2 + 3
        stress.update(num_gpu_blocks_override=blocks, max_num_seqs=16)
    elif text is None and has("thinking", 0.3):
        # Without preemption, after which plain vLLM begins to count anew.
        settings["reasoning_config"] = {
            "reasoning_start_str": "<think>",
            # Where the model itself has begun an end of several tokens, the runners differ.
            "reasoning_end_str": rng.choice(["</think>", "the</think>"][: 2 - second_runner]),
        }
    elif model != "llama4_chunks" and has("large blocks", 0.3):
        stress["block_size"] = 128
    # vLLM on CPU has no chunked prefill for latent attention.
    if "latent" not in model and has("chunked prefill", 0.4):
        stress["max_num_batched_tokens"] = rng.choice([24, 48])
        stress["max_num_seqs"] = min(stress["max_num_seqs"], 3)
    stress["enable_prefix_caching"] = has("prefix caching", 0.4)
    if has("priority scheduling", 0.3):
        stress["scheduling_policy"] = "priority"

    proposer = rng.choice(
        [*["hidden_path"] * 4, "ngram_trie", "always_right", *["jacobi_window", "hybrid"] * 2]
    )
    features.add(f"proposer {proposer}")
    nodes = rng.choice([1, 4, 8, 16, 16, 32])
    if lora and "chunked prefill" in features:  # vLLM wants room for all drafts beside adapters
        stress["max_num_batched_tokens"] = stress["max_num_seqs"] * (1 + nodes)
    lookahead: dict[str, Any] = dict(proposer=proposer, num_speculative_tokens=nodes, budget=nodes)
    if proposer == "ngram_trie":
        lookahead["draft"] = rng.choice(["hierarchical", "parallel", "single"])
    if proposer in ("ngram_trie", "hybrid"):
        lookahead["share"] = rng.choice(["all", "namespace", "namespace", "none"])
        for option in ("accept_namespaces", "accept_references"):
            if rng.random() < 0.2:
                lookahead[option] = False
    if proposer in HAVE_WINDOW:
        lookahead["ngram_size"] = rng.choice([2, 3, 4, 5, 5])
        lookahead["window_shift"] = rng.choice(["one", "hits", "paper"])
        lookahead["pool_from_prompt"] = rng.random() < 0.5
        if proposer == "hybrid":
            lookahead["sources"] = rng.choice(["both", "both", "prompt", "output", "none"])

    if second_runner and "thinking" in features:
        features.add("thinking once")
    tenants = [Tenant(None, None, range(SPECIAL, VOCAB), [])]
    if has("namespaces", 0.5):
        tenants = _tenants(rng, apart=has("namespaces of different words", 0.5))
    for tenant in tenants:
        tenant.prefix = _words(rng, rng.randint(0, 40), text, tenant.words)
    requests = [
        _draw_request(rng, rng.choice(tenants), text, features, settings, lora)
        for _ in range(rng.randint(16, 40))
    ]
    # The client of servers makes other numbers of token ids.
    if not http and has("references", 0.4):
        for request in rng.sample(requests, len(requests) // 3):
            request.features.add("reference")
            request.references = [
                rng.randrange(len(requests))
                if rng.random() < 0.5
                else _words(rng, rng.choice(REFERENCE_LENGTHS), text)
                for _ in range(1 if rng.random() < 0.7 else 2)
            ]
    if proposer in HAVE_WINDOW:
        server = LookaheadOptions.from_dict(lookahead).for_model(0)
        for request in rng.sample(requests, len(requests) // 2):
            request.features.add("wishes")
            request.params.setdefault("extra_args", {}).update(_overrides(rng, server))
    return Round(model, settings, stress, lookahead, requests, features)


def _overrides(rng: random.Random, server: LookaheadOptions) -> dict[str, Any]:
    """What one request may want otherwise than the server does, in part."""
    overrides: dict[str, Any] = dict(
        window_size=rng.randint(0, server.window.window_size),
        ngram_size=rng.randint(2, server.ngram_size),
        guess_set_size=rng.randint(1, int(server.guess_set_size)),
        pool_from_prompt=rng.random() < 0.5,
    )
    if server.proposer == "hybrid":
        overrides["proposer"] = rng.choice(["hybrid", "ngram_trie", "jacobi_window"])
    return {
        f"lookahead_{name}": override for name, override in overrides.items() if rng.random() < 0.6
    }


def _tenants(rng: random.Random, apart: bool) -> list[Tenant]:
    """Two to four; `apart`: whose prompts have no token in common."""
    count = rng.randint(2, 4)
    width = (VOCAB - SPECIAL) // count
    tenants = []
    for i in range(count):
        namespace, salt = rng.choice([(f"namespace {i}", None), (None, f"salt {i}"), ("n", f"{i}")])
        first = SPECIAL + i * width
        words = range(first, first + width) if apart else range(SPECIAL, VOCAB)
        tenants.append(Tenant(namespace, salt, words, []))
    if rng.random() < 0.3:
        tenants[0].namespace = tenants[0].salt = None
    return tenants


def _words(
    rng: random.Random, count: int, text: list[int] | None, words: range = range(SPECIAL, VOCAB)
) -> list[int]:
    if text is None:
        return [rng.choice(words) for _ in range(count)]
    start = rng.randrange(len(text) - count)
    return text[start : start + count]


def _places(rng: random.Random, length: int) -> list[bool]:
    """Where a prompt has embeddings: everywhere, or here and there."""
    if rng.random() < 0.5:
        return [True] * length
    here, places = rng.random() < 0.5, []
    for _ in range(length):
        here ^= rng.random() < 0.25
        places.append(here)
    return places


def _draw_request(
    rng: random.Random,
    tenant: Tenant,
    text: list[int] | None,
    features: set[str],
    settings: dict[str, Any],
    lora: bool,
) -> Request:
    # Half of the prompts begin alike, and say some things twice.
    prompt = tenant.prefix[: rng.randint(0, len(tenant.prefix))] if rng.random() < 0.5 else []
    prompt = prompt + _words(rng, rng.randint(2, 24), text, tenant.words)
    if rng.random() < 0.3:
        prompt = prompt + prompt[: rng.randint(1, len(prompt))]
    if "thinking" in features and rng.random() < 0.6:
        prompt.insert(rng.randrange(len(prompt)), THINK)
    prompt = prompt[: settings["max_model_len"] - 8]
    request = Request(
        prompt,
        chat=len(prompt) % 2 == 0,
        params=dict(max_tokens=rng.choice([1, 3, 12, 40, 40, 60])),
        namespace=tenant.namespace,
        salt=tenant.salt,
    )
    params = request.params
    if request.namespace is not None:
        request.features.add("namespace")
        params["extra_args"] = {"lookahead_namespace": request.namespace}
    if request.salt is not None:
        request.features.add("cache salt")
    if "prompt embeddings" in features and rng.random() < 0.6:
        request.embedded = _places(rng, len(prompt))
        alone = all(request.embedded)
        request.features.add("embeddings alone" if alone else "embeddings and token ids")
        if rng.random() < 0.3:
            request.features.add("embeddings of no token")
            request.noise = rng.randrange(10**6)
    if rng.random() < 0.5:
        request.features.add("greedy")
        params["temperature"] = 0.0
    else:
        request.features.add("seeded")
        params.update(temperature=rng.choice([0.3, 0.8, 1.3]), seed=rng.randrange(10**6))
        if rng.random() < 0.2:
            request.features.add("n > 1")
            params["n"] = rng.randint(2, 3)
    if "structured output" in features and rng.random() < 0.5:
        request.structured = rng.choice(SCHEMAS)
        request.features.add(f"structured output, {next(iter(request.structured))}")
    for name, (chance, draw) in REQUEST_FEATURES.items():
        if ONLY_IN_SOME_ROUNDS.get(name, name) not in {name, *features}:
            continue
        if "logprobs" in name and (name == "logprob_token_ids") != ("chosen_logprobs" in features):
            continue  # plain vLLM mixes them up within one batch
        if name == "prompt_logprobs" and lora:
            continue  # kills plain vLLM on CPU
        if request.structured is not None and name in ("allowed_token_ids", "bad_words"):
            continue  # may leave no token at all
        if not request.known_prompt and name in ("repetition_penalty", "prompt_logprobs"):
            continue  # plain vLLM penalizes what stood in its batch's row before
        if rng.random() < chance:
            request.features.add(name)
            drawn = draw(rng)
            if "extra_args" in drawn:
                drawn["extra_args"] |= params.get("extra_args", {})
            params.update(drawn)
    if params.get("min_tokens", 0) > params["max_tokens"]:
        params["min_tokens"] = params["max_tokens"]
    if "structured output after reasoning" in features:
        params["logit_bias"] = {**params.get("logit_bias", {}), END_OF_THINKING: 4.0}
    if "thinking once" in features:  # a second beginning restarts the second runner's count alone
        params["logit_bias"] = {**params.get("logit_bias", {}), THINK: -100.0}
    if lora:  # beside adapters, plain vLLM on CPU gives requests without one the last adapter
        request.adapter = rng.randint(1, 2)
        request.features.add("lora adapter")
    if "priority scheduling" in features:
        request.priority = rng.randint(0, 3)
    request.arrival = rng.choice([0, 0, rng.randint(0, 30)])
    if rng.random() < 0.08:
        request.features.add("aborted")
        request.abort_after = rng.randint(1, 20)
    if rng.random() < 0.3:
        request.features.add("streamed")
        request.streamed = True
    return request
