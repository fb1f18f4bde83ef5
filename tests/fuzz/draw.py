"""Draws one round of the fuzzer, a function of its seed alone."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import RepetitionDetectionParams

from tests.fuzz.round import TWO_REPLICAS, TWO_STAGES, Request, Round
from tests.support.drafters import TARGETS

VOCAB = 128
SPECIAL = 5
"""Token ids below this are special, see tests/support/tokenizer.py."""
THINK, END_OF_THINKING = 3, 4
REFERENCE_LENGTHS = (1, 20, 100, 900)
LATENT = ("deepseek_v2", "deepseek_v3")  # models with latent attention
HYBRIDS = ("falcon_h1", "nemotron_h", "granite4", "zamba2", "lfm2", "qwen3_next")
"""Models with recurrent layers, see tests/support/hybrid_models.py."""
WITH_IMAGES = ("qwen2_vl", "qwen3_vl")  # see ImagePrompts in tests/support/models.py
IN_STAGES = ("llama", "mixtral", "qwen2", "qwen3", "falcon_h1", "granite4", "lfm2", "qwen3_next")
"""Models that also run in a pipeline."""

Draw = Callable[[random.Random], dict[str, Any]]


@dataclass
class Tenant:
    """Requests with the same adapter that share answers."""

    namespace: str | None
    salt: str | None
    vocabulary: range
    """Token ids that their prompts are drawn from."""
    prefix: list[int]


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
    dict(
        structural_tag=json.dumps(
            {
                "type": "structural_tag",
                "structures": [{"begin": "(", "schema": {"type": "integer"}, "end": ")"}],
                "triggers": ["("],
            }
        )
    ),
]


def _ids(rng: random.Random, max_count: int) -> list[int]:
    return rng.sample(range(SPECIAL, VOCAB), rng.randint(1, max_count))


def _text(rng: random.Random) -> str:
    return rng.choice(["the", "in", "an", '": ', "true", "q", "z", "!", " ", "ab", "\n"])


def _repetitions(rng: random.Random) -> RepetitionDetectionParams:
    longest = rng.choice([1, 2, 6])
    return RepetitionDetectionParams(longest, rng.randint(0, longest), rng.choice([2, 3]))


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
            stop=[_text(r), r.choice(["", _text(r)]) + _text(r)],
            include_stop_str_in_output=r.random() < 0.5,
        ),
    ),
    "repetition_detection": (0.1, lambda r: dict(repetition_detection=_repetitions(r))),
    "skip_special_tokens": (0.1, lambda r: dict(skip_special_tokens=False)),
    "skip_reading_prefix_cache": (0.1, lambda r: dict(skip_reading_prefix_cache=True)),
    "off": (0.08, lambda r: dict(extra_args={"lookahead_enabled": False})),
    "ignore_eos": (0.4, lambda r: dict(ignore_eos=True)),
    "ban": (0.3, lambda r: dict(extra_args={"ban": r.uniform(0.5, 9)})),
    # For all requests of a round or none: in plain vLLM, a request without a budget can inherit the
    # state of a finished one.
    "thinking_token_budget": (1.0, lambda r: dict(thinking_token_budget=r.randint(0, 24))),
    "logprobs": (0.25, lambda r: dict(logprobs=r.choice([0, 1, 5, -1]))),
    "flat_logprobs": (0.1, lambda r: dict(flat_logprobs=True)),
    "prompt_logprobs": (0.08, lambda r: dict(prompt_logprobs=r.choice([0, 3]))),
    "logprob_token_ids": (0.3, lambda r: dict(logprob_token_ids=_ids(r, 5))),
}
"""By feature: its probability in a request, and a function that draws its parameters."""

ONLY_IN_SOME_ROUNDS = {
    "ban": "custom_logits_processor",
    "thinking_token_budget": "thinking",
    "logprob_token_ids": "chosen_logprobs",
}
"""These request features need a feature of the round."""


class FeatureDraws:
    """Draws from one generator, and collects the features of a round."""

    def __init__(self, rng: random.Random, features: set[str]) -> None:
        self.rng = rng
        self.features = features

    def has(self, feature: str, probability: float) -> bool:
        """Add the feature with this probability; return whether it was added."""
        if self.rng.random() < probability:
            self.features.add(feature)
            return True
        return False


def draw_round(
    seed: str,
    models: list[str],
    elsewhere_share: float = 0.125,
    with_drafter: bool = False,
    with_fleet: bool = False,
) -> Round:
    """Draw the round of this seed; equal arguments give equal rounds.

    With a probability of `elsewhere_share`, lookahead's engine runs in other processes.
    `with_drafter`, a trained drafter proposes, too; `with_fleet`, two engines share what they
    learn.
    """
    rng = random.Random(seed)
    model = rng.choice(models)
    features = {f"model {model}"}
    draws = FeatureDraws(rng, features)
    elsewhere = ""
    if rng.random() < elsewhere_share:
        elsewhere = rng.choice(
            ["engine and worker"]
            + [TWO_STAGES] * (model in IN_STAGES and not with_drafter)
            + [TWO_REPLICAS] * (model not in HYBRIDS and not with_drafter)
        )
        features.add(f"other processes: {elsewhere}")
    settings = _draw_settings(draws, model)
    stress = _draw_stress(draws, model, settings)
    lookahead = _draw_lookahead(draws, with_drafter, with_fleet)
    if elsewhere == TWO_REPLICAS:
        lookahead["parallel"] = 2
    drafter = ""
    if with_drafter:
        drafter = rng.choice([name for name, targets in TARGETS.items() if model in targets])
        features.add(f"drafter {drafter}")
        draws.has("chains alone", 0.5 * (not elsewhere))
    for feature in ("sized steps", "growing threads"):
        draws.has(feature, 0.5 * (not elsewhere))
    if "lora" in features and "chunked prefill" in features:
        # With LoRA, vLLM reserves room for all drafts.
        per_request = 1 + max(lookahead["num_speculative_tokens"], 4 * with_drafter)
        stress["max_num_batched_tokens"] = stress["max_num_seqs"] * per_request
    requests = _draw_requests(draws, settings)
    if draws.has("references", 0.4):
        _add_references(rng, requests)
    if lookahead["proposer"] in ("ngram_trie", "hybrid") and draws.has("conversations", 0.4):
        _add_conversations(rng, requests, settings["max_model_len"])
    # After a preemption, plain vLLM restarts its count of thinking tokens; and a prompt in chunks
    # would start again and again.
    may_reset = model not in HYBRIDS and features.isdisjoint({"thinking", "chunked prefill"})
    interruption = ""
    if draws.has("resets", 0.15 * may_reset):
        interruption = rng.choice(["resets", *["pauses that clear caches"] * (not elsewhere)])
    elif draws.has("pauses", 0.15 * (not elsewhere)):
        interruption = "pauses"
    # Sessions keep KV while they wait, and plain vLLM keeps the thinking tokens of earlier turns.
    may_have_sessions = features.isdisjoint({"thinking", "preemption", "resets"})
    if draws.has("sessions", 0.3 * may_have_sessions):
        # When plain vLLM finds a stop, the step in flight has read one token more into recurrent
        # states. What the next turn reads depends on the size of the blocks.
        may_stop = model not in HYBRIDS or "prefix caching" not in features
        _add_sessions(rng, requests, settings["max_model_len"], may_stop)
    return Round(
        model,
        settings,
        stress,
        lookahead,
        requests,
        features,
        drafter,
        elsewhere,
        interruption,
        rng.choice([2, 5]),
        with_fleet,
    )


def _draw_settings(draws: FeatureDraws, model: str) -> dict[str, Any]:
    """Draw the arguments of both engines."""
    rng, has = draws.rng, draws.has
    settings: dict[str, Any] = dict(
        max_model_len=rng.choice([96, 256]), max_logprobs=-1, block_size=32
    )
    if model in HYBRIDS and has("prefix caching", 0.7):  # which changes how states are rounded
        settings.update(enable_prefix_caching=True, prefix_cache_retention_interval=None)
        settings["max_model_len"] = 512
    if has("logprobs_mode", 0.5):
        settings["logprobs_mode"] = rng.choice(
            ["raw_logits", "processed_logprobs", "processed_logits"]
        )
    has("custom_logits_processor", 0.25)
    lora = model == "llama" and has("lora", 0.7)
    if lora:
        settings.update(enable_lora=True, max_loras=2, max_lora_rank=8)
    # With LoRA, vLLM's embedding layer cannot embed only some of a step's tokens.
    # And the embeddings of tokens are read from an engine of this process.
    elsewhere = any(feature.startswith("other processes") for feature in draws.features)
    if not (elsewhere or lora) and has("prompt embeddings", 0.35):
        settings["enable_prompt_embeds"] = True
    if has("structured output", 0.5):
        # Guidance has no room for the token that prompt embeddings add to the tokenizer, nor for
        # the 129th one of these models.
        is_larger = model in ("qwen2", "qwen2_vl", "mimo")
        backends = ["xgrammar", "xgrammar", "guidance"]
        if is_larger or "prompt embeddings" in draws.features:
            backends = backends[:2]
        backend = rng.choice(backends)
        draws.features.add(f"structured output, {backend}")
        settings["structured_outputs_config"] = {"backend": backend}
        if has("structured output after reasoning", 0.2):
            settings["reasoning_parser"] = "deepseek_r1"
    has("chosen_logprobs", 0.15)
    # vLLM on CPU has no fp8 cache for latent attention.
    if model not in LATENT and has("fp8 cache", 0.12):
        settings["kv_cache_dtype"] = rng.choice(["fp8", "fp8_e5m2"])
    return settings


def _draw_stress(draws: FeatureDraws, model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Draw further arguments of the lookahead engine, and `reasoning_config` for both engines."""
    rng, has = draws.rng, draws.has
    stress: dict[str, Any] = dict(max_num_seqs=rng.choice([1, 3, 16]))
    # A preempted text is read as a prompt, which rounds recurrent states in another way.
    if has("preemption", 0.0 if model in HYBRIDS else 0.2):
        # Enough blocks for one request of full length, even with two KV cache groups.
        blocks = settings["max_model_len"] // 32 * 2 + 3
        stress.update(num_gpu_blocks_override=blocks, max_num_seqs=16)
    elif has("thinking", 0.3):
        # Not with preemption, after which plain vLLM restarts its count of thinking tokens.
        # After reasoning, a grammar and the rest of a longer end may leave no permitted token.
        # Where prompts have images, "the" is one of their patches, and may not be in an answer.
        is_short = "reasoning_parser" in settings or model in WITH_IMAGES
        ends = ["</think>"] if is_short else ["</think>", "the</think>"]
        settings["reasoning_config"] = {
            "reasoning_start_str": "<think>",
            "reasoning_end_str": rng.choice(ends),
        }
    elif (
        model != "llama4_chunks"
        and "prefix caching" not in draws.features
        and has("large blocks", 0.3)
    ):
        stress["block_size"] = 128
    # vLLM on CPU has no chunked prefill for latent attention.
    if model not in LATENT and has("chunked prefill", 0.4):
        stress["max_num_batched_tokens"] = rng.choice([24, 48])
        stress["max_num_seqs"] = min(stress["max_num_seqs"], 3)
        if model not in HYBRIDS and has("long prompts in shorter chunks", 0.4):
            stress["long_prefill_token_threshold"] = rng.choice([3, 10])
    if model not in HYBRIDS:
        # There, the step in flight at a stop has changed the state of the next turn.
        if has("no step ahead", 0.12):
            stress["async_scheduling"] = False
        stress["enable_prefix_caching"] = has("prefix caching", 0.4)
    if has("priority scheduling", 0.3):
        stress["scheduling_policy"] = "priority"
    return stress


def _draw_lookahead(draws: FeatureDraws, with_drafter: bool, with_fleet: bool) -> dict[str, Any]:
    """Draw the speculative config."""
    rng = draws.rng
    choices = [*["hidden_path"] * 4, "ngram_trie", "always_right", *["jacobi_window", "hybrid"] * 2]
    if with_drafter:
        choices = ["hidden_path", *["ngram_trie", "hybrid"] * 3]
    if with_fleet:
        choices = ["ngram_trie", "hybrid"]
    proposer = rng.choice(choices)
    draws.features.add(f"proposer {proposer}")
    nodes = rng.choice([1, 4, 8, 16, 16, 32])
    lookahead: dict[str, Any] = dict(proposer=proposer, num_speculative_tokens=nodes, budget=nodes)
    if proposer in ("ngram_trie", "hybrid"):
        shares = ["all", "namespace", "namespace"] + ["none"] * (not with_fleet)
        lookahead["share"] = rng.choice(shares)
        lookahead["client_options"] = rng.choice(["all"] * 3 + ["no_namespaces", "none"])
    return lookahead


def _draw_requests(draws: FeatureDraws, settings: dict[str, Any]) -> list[Request]:
    rng = draws.rng
    tenants = [Tenant(None, None, range(SPECIAL, VOCAB), [])]
    if draws.has("namespaces", 0.5):
        disjoint = draws.has("namespaces of disjoint vocabularies", 0.5)
        tenants = _tenants(rng, disjoint)
    for tenant in tenants:
        tenant.prefix = _draw_tokens(rng, rng.randint(0, 40), tenant.vocabulary)
    return [
        _draw_request(rng, rng.choice(tenants), draws.features, settings)
        for _ in range(rng.randint(16, 40))
    ]


def _add_references(rng: random.Random, requests: list[Request]) -> None:
    """Give a third of the requests one or two references."""
    for request in rng.sample(requests, len(requests) // 3):
        request.features.add("reference")
        request.references = [
            rng.randrange(len(requests))
            if rng.random() < 0.5
            else _draw_tokens(rng, rng.choice(REFERENCE_LENGTHS))
            for _ in range(1 if rng.random() < 0.7 else 2)
        ]


def _add_conversations(rng: random.Random, requests: list[Request], max_model_len: int) -> None:
    """Let most requests go on from the prompt of an earlier one of their tenant, or from a part of
    it, some of them with tool results."""
    for i, request in enumerate(requests):
        others = [
            other
            for other in requests[:i]
            if other.embedded is None
            and (other.adapter, other.salt, other.namespace)
            == (request.adapter, request.salt, request.namespace)
        ]
        if request.embedded is not None or not others or rng.random() < 0.2:
            continue
        other = rng.choice(others[-3:])
        kept = len(other.prompt) - rng.choice([0, 0, 1, 2, 3, 4, rng.randint(0, len(other.prompt))])
        longer = other.prompt[: max(kept, 0)] + _draw_tokens(rng, rng.randint(2, 12))
        request.prompt = longer[: max_model_len - 8]
        request.arrival = other.arrival + rng.randint(0, 60)
        if rng.random() < 0.5:
            request.features.add("tool results")
            request.spellings = [
                _draw_tokens(rng, rng.randint(0, 100)) for _ in range(rng.choice([1, 1, 3]))
            ]


def _add_sessions(
    rng: random.Random, requests: list[Request], max_model_len: int, may_stop: bool
) -> None:
    """Make streaming sessions of a third of the requests that can be one.

    `may_stop` is whether a turn may end before its `max_tokens`.
    """
    possible = [
        request
        for request in requests
        if request.embedded is None
        and request.structured is None  # plain vLLM keeps the grammar of the first turn
        and request.params.keys().isdisjoint({"n", "prompt_logprobs"})
    ]
    for request in rng.sample(possible, -(-len(possible) // 3)):
        request.turns = [_draw_tokens(rng, rng.randint(1, 6)) for _ in range(rng.randint(1, 3))]
        request.hurry_after = rng.choice([None, 0, rng.randint(1, 12)])
        request.streamed = True
        request.features.add("streaming session")
        params = request.params
        for name in ("stop", "include_stop_str_in_output"):  # vLLM refuses them in sessions
            params.pop(name, None)
            request.features.discard(name)
        if rng.random() < 0.5:
            request.features.add("stop_token_ids")
            params["stop_token_ids"] = rng.sample(range(SPECIAL, VOCAB), 10)
        if not may_stop:
            params.pop("stop_token_ids", None)
            params["ignore_eos"] = True
            request.features.discard("stop_token_ids")
            request.features.add("ignore_eos")
        if params["temperature"] == 0 and rng.random() < 0.3:
            params["seed"] = rng.randrange(10**6)
        request.prompt = request.prompt[:32]
        length = len(request.prompt) + sum(map(len, request.turns))
        room = (max_model_len - 8 - length) // (1 + len(request.turns))
        params["max_tokens"] = min(params["max_tokens"], room)
        params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
        if rng.random() < 0.5:
            request.features.add("changed parameters")
            request.changes = [_changed(rng, params["max_tokens"]) for _ in request.turns]


def _changed(rng: random.Random, most: int) -> dict[str, Any]:
    """Parameters that another turn of a session has."""
    sampling = rng.choice([dict(temperature=0.0), dict(temperature=0.8, seed=rng.randrange(10**6))])
    return {
        **sampling,
        "max_tokens": rng.randint(1, most),
        "min_tokens": 0,
        "top_k": rng.choice([0, 3, 20]),
        "frequency_penalty": rng.choice([0.0, 0.0, 1.0]),
        "extra_args": rng.choice([{}, {"lookahead_enabled": False}]),
    }


def _tenants(rng: random.Random, disjoint: bool) -> list[Tenant]:
    """Draw two to four; if `disjoint`, their prompts have no token in common."""
    count = rng.randint(2, 4)
    width = (VOCAB - SPECIAL) // count
    tenants = []
    for i in range(count):
        namespace, salt = rng.choice([(f"namespace {i}", None), (None, f"salt {i}"), ("n", f"{i}")])
        first = SPECIAL + i * width
        vocabulary = range(first, first + width) if disjoint else range(SPECIAL, VOCAB)
        tenants.append(Tenant(namespace, salt, vocabulary, []))
    if rng.random() < 0.3:
        tenants[0].namespace = tenants[0].salt = None
    return tenants


def _draw_tokens(
    rng: random.Random, count: int, vocabulary: range = range(SPECIAL, VOCAB)
) -> list[int]:
    return [rng.choice(vocabulary) for _ in range(count)]


def _draw_embedded(rng: random.Random, length: int) -> list[bool]:
    """Which tokens of a prompt are sent as embeddings: all, or some stretches of it."""
    if rng.random() < 0.5:
        return [True] * length
    is_embedded, embedded = rng.random() < 0.5, []
    for _ in range(length):
        is_embedded ^= rng.random() < 0.25
        embedded.append(is_embedded)
    return embedded


def _draw_request(
    rng: random.Random, tenant: Tenant, features: set[str], settings: dict[str, Any]
) -> Request:
    # Half of the prompts share a prefix with their tenant's others; some repeat themselves.
    prompt = tenant.prefix[: rng.randint(0, len(tenant.prefix))] if rng.random() < 0.5 else []
    prompt = prompt + _draw_tokens(rng, rng.randint(1, 24), tenant.vocabulary)
    if rng.random() < 0.3:
        prompt = prompt + prompt[: rng.randint(1, len(prompt))]
    # Plain vLLM's Mamba 2 on a CPU has NaN after some 450 tokens of such prompts.
    is_longest = features.isdisjoint(f"model {name}" for name in HYBRIDS) and rng.random() < 0.04
    if is_longest:
        prompt = prompt * settings["max_model_len"]
    if "thinking" in features and rng.random() < 0.6:
        prompt.insert(rng.randrange(len(prompt)), THINK)
    prompt = prompt[: settings["max_model_len"] - (rng.randint(1, 3) if is_longest else 8)]
    request = Request(
        prompt,
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
        request.embedded = _draw_embedded(rng, len(prompt))
        mixed = not all(request.embedded)
        request.features.add("embeddings and token ids" if mixed else "embeddings only")
        if rng.random() < 0.3:
            request.features.add("random embeddings")
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
    _draw_params(rng, request, features)
    if "lora" in features:  # plain vLLM on CPU applies the last adapter to requests without one
        request.adapter = rng.randint(1, 2)
        request.features.add("lora adapter")
    if "priority scheduling" in features:
        request.priority = rng.randint(0, 3)
    request.arrival = rng.choice([0, 0, rng.randint(0, 30)])
    if rng.random() < 0.08:
        request.features.add("aborted")
        request.abort_after = rng.randint(1, 20)
        if rng.random() < 0.5:
            request.features.add("aborted within a step")
            request.aborts_within_step = True
    if rng.random() < 0.3:
        request.features.add("streamed")
        request.streamed = True
    return request


def _draw_params(rng: random.Random, request: Request, features: set[str]) -> None:
    """Draw the sampling parameters of REQUEST_FEATURES, as far as plain vLLM can combine them."""
    params = request.params
    for name, (probability, draw) in REQUEST_FEATURES.items():
        if ONLY_IN_SOME_ROUNDS.get(name, name) not in {name, *features}:
            continue
        if "logprobs" in name and (name == "logprob_token_ids") != ("chosen_logprobs" in features):
            continue  # plain vLLM confuses the two within one batch
        if name == "prompt_logprobs" and "lora" in features:
            continue  # crashes plain vLLM on CPU
        if request.structured is not None and name in ("allowed_token_ids", "bad_words"):
            continue  # may leave no permitted token
        if not request.known_prompt and name in ("repetition_penalty", "prompt_logprobs"):
            continue  # plain vLLM would read the tokens of the row's previous request
        if rng.random() < probability:
            request.features.add(name)
            drawn = draw(rng)
            if "extra_args" in drawn:
                drawn["extra_args"] |= params.get("extra_args", {})
            params.update(drawn)
    if params.get("min_tokens", 0) > params["max_tokens"]:
        params["min_tokens"] = params["max_tokens"]
    if "structured output after reasoning" in features:
        params["logit_bias"] = {**params.get("logit_bias", {}), END_OF_THINKING: 4.0}
