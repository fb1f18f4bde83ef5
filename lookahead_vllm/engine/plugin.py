"""The entry point `vllm.general_plugins`: puts `lookahead` among vLLM's speculative methods.

Two functions of `EngineArgs` are patched (`seams.md`). Without lookahead in the engine's
arguments they add two flags and a choice of --spec-method to `--help`, and nothing else: all other
modules are imported when lookahead is requested, most of them after `compatibility.check`.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from lookahead_vllm.engine import patches

HOME = "vllm.engine.arg_utils"
"""The module of `EngineArgs`."""

PLAIN_V2 = "LOOKAHEAD_VLLM_PLAIN_V2"
"""The environment variable with which plain vLLM runs Model Runner V2 on a CPU, too, with the
kernels that lookahead brings: then seeded samples can be compared."""

FLAGS: dict[str, dict[str, Any]] = {
    "--speculative-model": dict(
        dest="spec_model",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help="'[lookahead]' drafts from the n-grams of prompts and past answers, and verifies the "
        "drafts as trees. In float32 the output is the same, token for token (on a GPU with "
        "TRITON_F32_DEFAULT=ieee); in bfloat16 and float16, near ties between two tokens may fall "
        "differently. Quote the brackets in zsh. Any other value means the same as --spec-model.",
    ),
    "--num-speculative-tokens": dict(
        dest="spec_tokens",
        type=lambda text: _number_or_auto(text),
        default=argparse.SUPPRESS,
        help="The decoding length: the most draft tokens that one request may have verified "
        "in one step. The same as --spec-tokens. Further options (max_nodes, share, ...) go into "
        "--speculative-config, for instance --speculative-config.max_nodes 8000000.",
    ),
}


def register() -> None:
    """Called by vLLM in every process, possibly more than once.

    Workers and engine processes never import `EngineArgs`, so this does not import it either.
    """
    if (module := sys.modules.get(HOME)) is not None:
        patch_engine_args(getattr(module, "EngineArgs", None))
    elif not any(isinstance(finder, _PatchOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PatchOnImport())


class _PatchOnImport:
    """A finder of `sys.meta_path` that patches `EngineArgs` once its module is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != HOME:
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = getattr(spec and spec.loader, "exec_module", None)
        if spec is None or execute is None:
            return None

        def exec_module(module: ModuleType) -> None:
            execute(module)
            patch_engine_args(getattr(module, "EngineArgs", None))

        spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
        return spec


def patch_engine_args(engine_args: Any) -> None:
    """Patch those functions that this release's `EngineArgs` has, once."""
    if not isinstance(engine_args, type) or patches.is_patched(engine_args):
        return
    wrappers: dict[str, Callable[[Any], Any]] = {
        "add_cli_args": functools.partial(_with_flags, engine_args),
        "create_engine_config": _with_lookahead,
    }
    for name, wrapper in wrappers.items():
        if name in vars(engine_args):
            patches.patch(engine_args, name, wrapper)


# ---- flags ---------------------------------------------------------------------------------------


def _with_flags(engine_args: type, original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineArgs.add_cli_args`, whose parser also has our flags and our method."""

    @functools.wraps(original)
    def add_cli_args(*args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        if isinstance(parser, argparse.ArgumentParser):
            _offer_flags(parser, engine_args)
            _offer_method(parser)
        return parser

    return add_cli_args


def _number_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)  # of any size: for vLLM's other methods, too
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} was given, but it must be a whole number or 'auto'; write one of these"
        ) from None


def _offer_flags(parser: Any, engine_args: type) -> None:
    """Add our flags to `parser` once one of them, or help, is requested.

    Not earlier: another plugin, or the user's script, may add flags of the same names after us, and
    every flag of a parser makes abbreviations of others ambiguous.
    """
    parse, format_original = parser.parse_known_args, parser.format_help
    added: set[str] = set()

    @functools.wraps(parse)
    def parse_known_args(args: Any = None, *others: Any, **kwargs: Any) -> Any:
        given = {str(arg).partition("=")[0] for arg in (sys.argv[1:] if args is None else args)}
        if not given.isdisjoint(FLAGS):
            added.update(_add_flags(parser))
            if "--speculative-model" in given & added and not hasattr(engine_args, "spec_model"):
                from lookahead_vllm.engine import compatibility

                compatibility.check()
        parsed = parse(args, *others, **kwargs)
        _refuse_wrong_options(parser, parsed[0])
        return parsed

    @functools.wraps(format_original)
    def format_help() -> Any:
        added.update(_add_flags(parser))
        return format_original()

    parser.parse_known_args, parser.format_help = parse_known_args, format_help


def _add_flags(parser: argparse.ArgumentParser) -> set[str]:
    """Add those of our flags that `parser` does not have; returns their names."""
    free = {name: flag for name, flag in FLAGS.items() if name not in parser._option_string_actions}
    if free:
        group = parser.add_argument_group(
            title="Lookahead",
            description="Lossless speculative decoding without a draft model (lookahead-vllm).",
        )
        for name, flag in free.items():
            group.add_argument(name, **flag)
    return set(free)


def _refuse_wrong_options(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End as for any wrong flag: by itself, `create_engine_config` would print a traceback."""
    from lookahead_vllm.engine import engine_args

    if not engine_args.requests_lookahead(given):
        return
    from lookahead_vllm.engine import compatibility
    from lookahead_vllm.options.allowed import OptionError

    try:
        compatibility.check()
        engine_args.requested_options(given)
    except (compatibility.SeamError, OptionError) as error:
        parser.error(str(error))


def _offer_method(parser: argparse.ArgumentParser) -> None:
    """Make lookahead a choice of vLLM's own flag for the method, if this release has one."""
    flag = parser._option_string_actions.get("--spec-method")
    if flag is None or flag.choices is None:
        return
    read, known = flag.type, list(flag.choices)

    def method(text: str) -> Any:
        from lookahead_vllm.engine import engine_args

        if text == "lookahead":
            return text
        if text not in known and engine_args.is_misspelled(text):
            raise argparse.ArgumentTypeError(engine_args.MISSPELLED.format(text))
        return read(text) if callable(read) else text

    flag.type, flag.choices = method, [*known, "lookahead"]


# ---- the engine's config -------------------------------------------------------------------------


def _with_lookahead(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineArgs.create_engine_config`, which also accepts lookahead's options."""

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from lookahead_vllm.engine import engine_args

        create = functools.partial(original, self, *args, **kwargs)
        if not engine_args.requests_lookahead(self):
            try:
                return _plain_config(create)
            except Exception as error:
                if (name := engine_args.misspelled_name(self)) is None:
                    raise
                from lookahead_vllm.options.allowed import OptionError

                raise OptionError(engine_args.MISSPELLED.format(name)) from error
        from lookahead_vllm.engine import compatibility

        compatibility.check()
        from vllm.platforms import current_platform

        from lookahead_vllm import compilation, kernel_folder
        from lookahead_vllm.engine import config
        from lookahead_vllm.engine.front_end import requests

        options = engine_args.requested_options(self)
        kernel_folder.share_cache_dir()
        compilation.begin(options, current_platform.is_cpu())
        vllm_config = config.make_config(self, options, create)
        requests.install()
        return vllm_config

    return create_engine_config


def _plain_config(create: Callable[[], Any]) -> Any:
    """Plain vLLM's config; on Model Runner V2, if a variable says so on a CPU."""
    if PLAIN_V2 not in os.environ:
        return create()
    from lookahead_vllm.engine import cpu_config

    return cpu_config.make_plain(create)
