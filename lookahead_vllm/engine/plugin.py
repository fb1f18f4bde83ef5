"""The entry point `vllm.general_plugins`: puts `lookahead` among vLLM's speculative methods.

Two functions of `EngineArgs` are wrapped (see `seams.py`); for anyone who does not ask for
lookahead they only add two flags to `--help`. Who asks for it also gets `front_end.py`.
"""

from __future__ import annotations

import argparse
import functools
import logging
from typing import Any

from lookahead_vllm import compiled
from lookahead_vllm.engine import config, front_end, release, shutdown

logger = logging.getLogger("vllm.lookahead")


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    from vllm.engine.arg_utils import EngineArgs

    if getattr(EngineArgs, "_lookahead_registered", False):
        return
    _wrap_add_cli_args(EngineArgs)
    _wrap_create_engine_config(EngineArgs)
    EngineArgs._lookahead_registered = True


def _wrap_add_cli_args(engine_args: Any) -> None:
    original = engine_args.add_cli_args

    @functools.wraps(original)
    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
        group = parser.add_argument_group(
            title="Lookahead",
            description="Lossless speculative decoding without a draft model (lookahead-vllm).",
        )
        group.add_argument(
            "--speculative-model",
            dest="spec_model",
            metavar="NAME",
            default=argparse.SUPPRESS,
            help="'[lookahead]' drafts from the n-grams of prompts and past outputs and verifies "
            "them as trees; the output stays token for token what it is without. Quote the "
            "brackets in zsh. Any other value means the same as --spec-model.",
        )
        group.add_argument(
            "--num-speculative-tokens",
            dest="spec_tokens",
            type=int,
            default=argparse.SUPPRESS,
            help="The decoding length: the most draft tokens that one request may have verified "
            "in one step. The same as --spec-tokens. Further options (branch_length, max_nodes, "
            "share, ...) go into --speculative-config, for instance "
            "--speculative-config.branch_length 12.",
        )
        return parser

    engine_args.add_cli_args = staticmethod(add_cli_args)


def _wrap_create_engine_config(engine_args: Any) -> None:
    original = engine_args.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = config.requested_options(self)
        if options is None:
            return original(self, *args, **kwargs)
        release.check()
        with config.as_custom_class(self, options):
            vllm_config = original(self, *args, **kwargs)
        config.apply(vllm_config, options)
        front_end.install()
        compiled.share_cache_dir()
        if options.cache_path is not None:
            shutdown.allow_time_to_end()
        return vllm_config

    engine_args.create_engine_config = create_engine_config
