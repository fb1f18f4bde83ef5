"""An engine's place in its fleet: which engines share, and the client of their server."""

import hashlib
import json
import os
from typing import Any, cast

from vllm.config import ModelConfig, VllmConfig

from lookahead_vllm.draft.fleet.exchange import TIMEOUT_SECONDS, Exchange
from lookahead_vllm.draft.fleet.member import Member
from lookahead_vllm.draft.fleet.pieces import FORMAT
from lookahead_vllm.draft.proposers.ngram_trie import SUFFIXES, NGramTrieProposer
from lookahead_vllm.draft.proposers.proposer import Proposer
from lookahead_vllm.engine.drafter.cache import fingerprint_of
from lookahead_vllm.options.server import LookaheadOptions

PREFIX = "lookahead"
"""All keys in the server begin with it."""

USERNAME, PASSWORD = "LOOKAHEAD_VLLM_SHARE_USERNAME", "LOOKAHEAD_VLLM_SHARE_PASSWORD"
"""Environment variables, so that neither has to be written into `share_with`, which vLLM logs."""

MAX_MESSAGES = 4_000
"""About how many messages the server keeps of a namespace."""

TOKENS_PER_NGRAM = 1 / 8
"""Of the shared n-grams in a full trie."""


def join_fleet(
    vllm_config: VllmConfig, options: LookaheadOptions, proposer: Proposer
) -> Exchange | None:
    """Share with other engines through the server that `options` name; None without one."""
    url = options.share_with
    if url is None:
        return None
    model_config = vllm_config.model_config
    trie = cast(NGramTrieProposer, proposer)  # the options were checked
    return Exchange(
        Member(trie),
        lambda: connect(url),
        f"{PREFIX}:{fingerprint_of_engine(model_config, options.share)}",
        MAX_MESSAGES,
        model_config.get_vocab_size(),
        int(options.max_nodes * TOKENS_PER_NGRAM),
    )


def connect(url: str) -> Any:
    """A client, which connects when it is used. It does not try again by itself."""
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    given = {"username": os.environ.get(USERNAME), "password": os.environ.get(PASSWORD)}
    return Redis.from_url(
        url,
        protocol=2,
        socket_timeout=TIMEOUT_SECONDS,
        socket_connect_timeout=TIMEOUT_SECONDS,
        retry=Retry(NoBackoff(), 0),
        **{name: value for name, value in given.items() if value},
    )


def fingerprint_of_engine(model_config: ModelConfig, share: str) -> str:
    """32 hex digits that two engines have in common only if they may share.

    They have the same model by its path, served name, revision and config, the same tokenizer, the
    same option `share`, and releases of lookahead with the same n-grams.
    """
    config = model_config.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    facts = [
        FORMAT,
        SUFFIXES,
        share,
        model_config.model,
        model_config.served_model_name,
        model_config.revision,
        model_config.get_vocab_size(),
        fingerprint_of(model_config),
        config,
    ]
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
