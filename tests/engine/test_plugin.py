"""Installed, and not asked for, lookahead changes nothing, under any release of vLLM."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm import envs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from lookahead_vllm.draft.options import LookaheadOptions, OptionError
from lookahead_vllm.engine import compatibility, config, plugin

HOME = "vllm.engine.arg_utils"
OURS = ("--speculative-model", "--num-speculative-tokens")


def stand_in(*fields: str, flags: tuple[str, ...] = (), without: str = "") -> Any:
    """The `EngineArgs` of another release, with these fields and flags."""

    class EngineArgs:
        def __init__(self, **given: Any) -> None:
            vars(self).update(given)
            self.__post_init__()

        def __post_init__(self) -> None:
            self.ready = True

        @classmethod
        def add_cli_args(cls, parser: Any, *, groups: tuple[str, ...] = ()) -> Any:
            for flag in flags:
                parser.add_argument(flag)
            return parser

        def create_engine_config(self, context: str = "none", *, mode: int = 0) -> Any:
            return self, context, mode

    for field in fields:
        setattr(EngineArgs, field, None)
    if without:
        delattr(EngineArgs, without)
    return EngineArgs


NOW = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
RELEASES = {
    "older": lambda: stand_in("speculative_model", "num_speculative_tokens", flags=OURS),
    "between": lambda: stand_in("speculative_config", flags=("--speculative-config",)),
    "newer": lambda: stand_in(*NOW, "spec_rounds", flags=("--spec-model", *OURS[:1])),
    "no flags": lambda: stand_in(*NOW, without="add_cli_args"),
    "no config": lambda: stand_in(*NOW, without="create_engine_config"),
}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers lookahead with a stand-in, twice."""

    def register(engine_args: Any) -> Any:
        module = ModuleType(HOME)
        if engine_args is not None:
            module.EngineArgs = engine_args  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, HOME, module)
        plugin.register()
        plugin.register()
        return engine_args

    return register


@pytest.fixture
def other_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources that are checked are not those of a release that fits."""
    monkeypatch.setattr(compatibility, "_package", lambda root: tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        *(None, {}, {"method": "ngram"}, {"model": "org/draft"}, {1: 2}, {"method": ["lookahead"]}),
        *("org/draft", "[ngram]", '{"method": "ngram"}', "{", "[" * 100_000, 7, object()),
    ],
    ids=lambda given: repr(given)[:20],
)
@pytest.mark.parametrize("name", RELEASES)
def test_who_does_not_ask_notices_nothing(
    name: str, given: Any, registered: Any, other_release: None
) -> None:
    engine_args = registered(RELEASES[name]())
    args = engine_args(speculative_config=given)
    assert args.ready and args.speculative_config is given
    if hasattr(engine_args, "create_engine_config"):
        assert args.create_engine_config("here", mode=3) == (args, "here", 3)
    if hasattr(engine_args, "add_cli_args"):
        parser = engine_args.add_cli_args(FlexibleArgumentParser(), groups=())
        assert vars(parser.parse_args([])).keys() <= {
            flag[2:].replace("-", "_") for flag in (*OURS, "--spec-model", "--speculative-config")
        }
        parser.format_help()


@pytest.mark.parametrize("engine_args", [None, lambda: None, 7, object()])
def test_without_its_class_nothing_happens(engine_args: Any, registered: Any) -> None:
    registered(engine_args)


def test_without_its_module_the_public_name_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    moved = stand_in(*NOW)
    monkeypatch.setattr(plugin, "HOME", "vllm.engine.gone")
    monkeypatch.setattr(vllm, "EngineArgs", moved, raising=False)
    plugin.register()
    assert "_lookahead_registered" in vars(moved)


@pytest.mark.parametrize("name", RELEASES)
def test_who_asks_under_another_release_hears_one_sentence(
    name: str, registered: Any, other_release: None
) -> None:
    engine_args = registered(RELEASES[name]())
    asking = [
        {"speculative_config": {"method": "lookahead"}},
        {"speculative_config": '{"model": "[lookahead]"}'},
        {"speculative_config": "lookahead"},
        {"speculative_config": {"model": "lookahead_vllm.NGramTrieProposer"}},
        {"spec_model": "[lookahead]"},
        {"spec_method": "lookahead"},
        {"speculative_model": "[lookahead]"},
    ]
    for given in asking:
        with pytest.raises(
            compatibility.SeamError, match=r"^this lookahead-vllm works with vLLM .*yours$"
        ):
            engine_args(**given).create_engine_config()


def test_who_asks_by_a_flag_that_leads_nowhere_hears_it_too(
    registered: Any, other_release: None
) -> None:
    engine_args = registered(RELEASES["between"]())
    parser = engine_args.add_cli_args(argparse.ArgumentParser())
    with pytest.raises(compatibility.SeamError):
        parser.parse_args(["--speculative-model=[lookahead]"])


@pytest.mark.parametrize("handler", ["error", "resolve"])
@pytest.mark.parametrize("taken", [OURS, OURS[:1], OURS[1:]])
@pytest.mark.parametrize("when", ["before", "after"])
def test_flags_of_others_stay_theirs(
    when: str, taken: tuple[str, ...], handler: str, registered: Any
) -> None:
    engine_args = registered(stand_in(*NOW, flags=taken if when == "before" else ()))
    parser = engine_args.add_cli_args(argparse.ArgumentParser(conflict_handler=handler))
    if when == "after":
        for flag in taken:
            parser.add_argument(flag)
    for _ in range(2):
        args = vars(parser.parse_args([f"{flag}=5" for flag in OURS]))
        for flag, dest in zip(OURS, ("spec_model", "spec_tokens"), strict=True):
            assert args[flag[2:].replace("-", "_") if flag in taken else dest] in ("5", 5)
        assert all(parser.format_help().count(f"  {flag} ") == 1 for flag in OURS)


def test_our_flags_make_no_abbreviation_ambiguous(registered: Any) -> None:
    flags = ("--speculative-config", "--num-speculative-rounds")
    engine_args = registered(stand_in(*NOW, flags=flags))
    parser = engine_args.add_cli_args(argparse.ArgumentParser())
    args = parser.parse_args(["--speculative", "a", "--num-spec", "b"])
    assert (args.speculative_config, args.num_speculative_rounds) == ("a", "b")


def test_registering_twice_wraps_once(registered: Any) -> None:
    engine_args = registered(stand_in(*NOW))
    wrapped = dict(vars(engine_args))
    plugin.register()
    assert dict(vars(engine_args)) == wrapped
    assert not hasattr(engine_args.create_engine_config.__wrapped__, "__wrapped__")


def test_a_release_without_the_second_runner_needs_no_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(envs.environment_variables, "VLLM_USE_V2_MODEL_RUNNER")
    args = stand_in(*NOW)(speculative_config={"method": "lookahead"})
    assert config.requested_options(args) == LookaheadOptions()


def test_a_config_of_another_type_is_refused() -> None:
    args = stand_in(*NOW)(speculative_config="lookahead")
    with pytest.raises(OptionError, match=r"='lookahead' was given, .* must be a dict; write"):
        config.requested_options(args)


REGISTERED = """
import argparse, json, sys, vllm.plugins
before = set(sys.modules)
from lookahead_vllm.engine.plugin import register
register()
loaded = [set(sys.modules) - before]
import vllm.engine.arg_utils as home
class EngineArgs:
    speculative_config = None
    def add_cli_args(parser):
        return parser
    def create_engine_config(self):
        return "plain"
wrapped = "_lookahead_registered" in vars(home.EngineArgs)
home.EngineArgs = EngineArgs
before = set(sys.modules)
register()
EngineArgs.add_cli_args(argparse.ArgumentParser()).parse_args([])
assert EngineArgs().create_engine_config() == "plain"
loaded.append(set(sys.modules) - before)
print(json.dumps([wrapped, *map(sorted, loaded)]))
"""


def test_registering_loads_next_to_nothing() -> None:
    """A worker of vLLM's CPU backend cannot start once numba is loaded, lookahead or not."""
    command = [sys.executable, "-c", REGISTERED]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    wrapped, registering, making = json.loads(said.splitlines()[-1])
    assert wrapped, "EngineArgs, imported later, is not wrapped"
    ours = {name for name in registering if name.startswith("lookahead_vllm.engine")}
    assert ours == {"lookahead_vllm.engine", "lookahead_vllm.engine.plugin"}
    ours = {name for name in making if name.startswith("lookahead_vllm.engine")}
    assert ours == {"lookahead_vllm.engine.config"}
    known = {"lookahead_vllm", *sys.stdlib_module_names}
    others = [n for n in (*registering, *making) if n.partition(".")[0] not in known]
    assert set(others) <= {"vllm.engine"}  # an empty package
