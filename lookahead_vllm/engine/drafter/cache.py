"""The cache file of an engine: its path, and the fingerprint of its tokenizer."""

from pathlib import Path
from typing import cast

from vllm.config import ModelConfig, VllmConfig

from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.draft.cache.keeper import CacheKeeper
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.proposer import Proposer
from lookahead_vllm.options.server import LookaheadOptions

SAVE_SECONDS = 60.0
"""Between two saves, if something was learned."""


def open_cache(
    vllm_config: VllmConfig, options: LookaheadOptions, proposer: Proposer
) -> CacheKeeper | None:
    """Load the cache file that `options` name, and save it from then on; None without one."""
    if options.cache_path is None:
        return None
    path = Path(options.cache_path)
    # Each data parallel rank of a dense model is an engine; vLLM resets its data_parallel_rank.
    if rank := vllm_config.parallel_config.data_parallel_index:
        path = path.with_name(f"{path.name}.dp{rank}")
    tokenizer = fingerprint_of(vllm_config.model_config)
    trie = cast("NGramTrieProposer", proposer)  # the options were checked
    vocab_size = vllm_config.model_config.get_vocab_size()
    return CacheKeeper(trie, path, SAVE_SECONDS, tokenizer, vocab_size)


def fingerprint_of(model_config: ModelConfig) -> str:
    """The fingerprint of the engine's tokenizer."""
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    if tokenizer is None:
        return cache_file.fingerprint_without_tokenizer(
            model_config.model, model_config.get_vocab_size()
        )
    return cache_file.fingerprint(tokenizer.get_vocab())
