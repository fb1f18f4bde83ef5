"""Installed but not enabled, lookahead changes nothing, under any release of vLLM."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from lookahead_vllm.engine import compatibility, engine_args, plugin
from lookahead_vllm.options.allowed import OptionError

HOME = "vllm.engine.arg_utils"
OURS = ("--speculative-model", "--num-speculative-tokens")


def fake_engine_args(*fields: str, flags: tuple[str, ...] = (), without: str = "") -> Any:
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
    "older": lambda: fake_engine_args("speculative_model", "num_speculative_tokens", flags=OURS),
    "between": lambda: fake_engine_args("speculative_config", flags=("--speculative-config",)),
    "newer": lambda: fake_engine_args(*NOW, "spec_rounds", flags=("--spec-model", *OURS[:1])),
    "no flags": lambda: fake_engine_args(*NOW, without="add_cli_args"),
}


@pytest.fixture(autouse=True)
def _as_users_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.PLAIN_V2)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers lookahead with a fake `EngineArgs`, twice."""

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
    """Make `compatibility.check` fail: there is no vLLM in the folder that it reads."""
    monkeypatch.setattr(compatibility, "package", lambda: tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        *(None, {}, {"method": "ngram"}, {"model": "org/draft"}, {1: 2}, {"method": ["lookahead"]}),
        *("org/draft", "[ngram]", '{"method": "ngram"}', "{", "[" * 100_000, 7, object()),
    ],
    ids=lambda given: repr(given)[:20],
)
@pytest.mark.parametrize("name", RELEASES)
def test_without_lookahead_nothing_changes(name, given, registered, other_release):
    engine_args = registered(RELEASES[name]())
    args = engine_args(speculative_config=given)
    assert args.ready and args.speculative_config is given
    assert args.create_engine_config("here", mode=3) == (args, "here", 3)
    if hasattr(engine_args, "add_cli_args"):
        parser = engine_args.add_cli_args(FlexibleArgumentParser(), groups=())
        assert vars(parser.parse_args([])).keys() <= {
            flag[2:].replace("-", "_") for flag in (*OURS, "--spec-model", "--speculative-config")
        }
        parser.format_help()


NEAR = [
    "Lookahead",
    "look-ahead",
    "lookahaed",
    "[lookahed]",
    "look_ahead_decoding",
    "LookAhead-vLLM",
    "lokahead",
]
FAR = ["ngram", "lookup", "HEAD", "org/lookahead-head", "lookahead_head", 7, "[" * 1000]


@pytest.mark.parametrize("name", [*NEAR, *FAR], ids=lambda name: repr(name)[:20])
def test_a_near_miss_is_told_once_vllm_has_refused_it(name, registered, tmp_path, monkeypatch):
    (tmp_path / "lookahead_head").touch()  # a model
    monkeypatch.chdir(tmp_path)
    refusal = ValueError("vLLM's")

    def refuse(self: Any) -> None:
        raise refusal

    for given in (
        {"speculative_config": {"method": name}},
        {"speculative_config": {"model": name}},
        {"spec_method": name},
        {"spec_model": name},
    ):
        assert registered(fake_engine_args(*NOW))(**given).create_engine_config()  # as vLLM does
        engine_args = fake_engine_args(*NOW)
        engine_args.create_engine_config = refuse
        with pytest.raises(ValueError, match="vLLM") as error:
            registered(engine_args)(**given).create_engine_config()
        if name in FAR:
            assert error.value is refusal
            continue
        assert isinstance(error.value, OptionError) and error.value.__cause__ is refusal
        assert f"{name!r} was given" in str(error.value)
        assert "write 'lookahead'" in str(error.value)


def test_no_method_of_vllm_is_a_near_miss():
    (flag,) = [a for a in real_parser()._actions if "--spec-method" in a.option_strings]
    others = [name for name in flag.choices if name not in (None, "lookahead")]
    assert len(others) > 30 and not any(map(engine_args.is_misspelled, others))


def real_parser() -> Any:
    """vLLM's parser, with what `register` adds."""
    plugin.register()
    return EngineArgs.add_cli_args(FlexibleArgumentParser())


@pytest.mark.parametrize("given", ["lookahead", "ngram"])
def test_vllms_own_flag_takes_our_method(given):
    assert real_parser().parse_args(["--spec-method", given]).spec_method == given


@pytest.mark.parametrize(
    ("given", "says"),
    [("Look-Ahead", "write 'lookahead'"), ("n_gram", "invalid choice: 'n_gram'")],
)
def test_vllms_own_flag_refuses_others(given, says, capsys):
    with pytest.raises(SystemExit):
        real_parser().parse_args(["--spec-method", given])
    assert says in capsys.readouterr().err


WRONG = {
    "did you mean 'max_nodes'?": ["--speculative-config", '{"method": "lookahead", "max_node": 9}'],
    "it must be": ["--spec-method=lookahead", "--num-speculative-tokens=0"],
    "write it once": [
        *("--speculative-model=[lookahead]", "--num-speculative-tokens=6"),
        "--speculative-config.num_speculative_tokens=6",
    ],
}


@pytest.mark.parametrize("says", WRONG)
def test_a_wrong_option_is_refused_as_any_wrong_flag_is(says, capsys):
    """By one sentence at the end, not by a traceback."""
    with pytest.raises(SystemExit):
        real_parser().parse_args(WRONG[says])
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_another_release_is_refused_as_any_wrong_flag_is(other_release, capsys):
    with pytest.raises(SystemExit):
        real_parser().parse_args(["--spec-method=lookahead"])
    assert "this lookahead-vllm works with vLLM" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", RELEASES)
def test_lookahead_under_another_release_is_refused_with_one_sentence(
    name, registered, other_release
):
    engine_args = registered(RELEASES[name]())
    asking = [
        {"speculative_config": {"method": "lookahead"}},
        {"speculative_config": {"model": "[lookahead]"}},
        {"speculative_config": "lookahead"},
        {"spec_model": "[lookahead]"},
        {"spec_method": "lookahead"},
        {"speculative_model": "[lookahead]"},
    ]
    for given in asking:
        with pytest.raises(
            compatibility.SeamError, match=r"^this lookahead-vllm works with vLLM .*yours$"
        ):
            engine_args(**given).create_engine_config()


@pytest.mark.parametrize("taken", [OURS, OURS[:1], OURS[1:]])
@pytest.mark.parametrize("when", ["before", "after"])
def test_flags_that_others_add_are_kept(when, taken, registered):
    engine_args = registered(fake_engine_args(*NOW, flags=taken if when == "before" else ()))
    parser = engine_args.add_cli_args(argparse.ArgumentParser())
    if when == "after":
        for flag in taken:
            parser.add_argument(flag)
    for _ in range(2):
        args = vars(parser.parse_args([f"{flag}=5" for flag in OURS]))
        for flag, dest in zip(OURS, ("spec_model", "spec_tokens"), strict=True):
            assert args[flag[2:].replace("-", "_") if flag in taken else dest] in ("5", 5)
        assert all(parser.format_help().count(f"  {flag} ") == 1 for flag in OURS)


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
from lookahead_vllm.engine import patches
patched = patches.is_patched(home.EngineArgs)
home.EngineArgs = EngineArgs
before = set(sys.modules)
register()
EngineArgs.add_cli_args(argparse.ArgumentParser()).parse_args([])
assert EngineArgs().create_engine_config() == "plain"
loaded.append(set(sys.modules) - before)
from lookahead_vllm import kernel_folder
from lookahead_vllm.engine import compatibility, config
from lookahead_vllm.engine.front_end import requests, stat_logger
print(json.dumps([patched, *map(sorted, loaded), "numba" in sys.modules]))
"""


def test_registering_loads_few_modules():
    """And nothing of the front end loads numba: a CPU worker in the same process, as of an offline
    engine, could not start after it."""
    command = [sys.executable, "-c", REGISTERED]
    stdout = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    patched, registering, making, has_numba = json.loads(stdout.splitlines()[-1])
    assert patched, "EngineArgs, imported later, is not patched"
    ours = {name for name in registering if name.startswith("lookahead_vllm.engine")}
    assert ours == {f"lookahead_vllm.engine{name}" for name in ("", ".patches", ".plugin")}
    ours = {name for name in making if name.startswith("lookahead_vllm.engine")}
    assert ours == {"lookahead_vllm.engine.engine_args"}
    known = {"lookahead_vllm", *sys.stdlib_module_names}
    others = [n for n in (*registering, *making) if n.partition(".")[0] not in known]
    assert set(others) <= {"vllm.engine"}  # an empty package
    assert not has_numba
