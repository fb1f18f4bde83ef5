"""What the README and the docs tell users to write is what the programs take."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.engine import plugin
from lookahead_vllm.engine.config import is_lookahead
from tests.support.models import save_tiny_model
from tests.support.tokenizer import save_tokenizer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

plugin.register()


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """The fenced blocks of a language, each with the name of its page."""
    for page in PAGES:
        for found in re.finditer(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S):
            yield page.name, found[1]


def commands() -> Iterator[list[str]]:
    """The words of every command in a block for the shell, settings before it left out."""
    for _, block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield words


COMMANDS = list(commands())
SERVERS = [words[2:] for words in COMMANDS if words[:2] == ["vllm", "serve"]]
SERVERS += [words[words.index("lookahead-vllm") + 1 :] for words in COMMANDS if "run" in words]


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.M)
            assert anchor in map(slug, headings), target


def test_blocks_can_be_read() -> None:
    for page, block in blocks("python"):
        ast.parse(block, page)
    for _, block in blocks("yaml"):
        assert yaml.safe_load(block)
    for _, block in blocks("bash"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)


def test_files_that_are_named_exist() -> None:
    for words in COMMANDS:
        for place, word in enumerate(words):
            if re.match(r"(\./)?(scripts|docker|configs)/", word):
                path = ROOT / word
                assert path.is_file(), word
                # Anything but Python's argument is run as it is.
                is_run = place == 0 or not words[place - 1].endswith(("python", "-f", "--config"))
                assert not is_run or path.stat().st_mode & 0o100, f"{word} cannot be run"


SCRIPTS = sorted({word for words in COMMANDS for word in words if word.startswith("scripts/")})


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_take_the_options_that_are_shown(script: str) -> None:
    shown = set()
    for words in COMMANDS:
        if script in words:
            rest = words[words.index(script) + 1 :]
            shown |= {word for word in rest if word.startswith("--")} - {"--"}
            if script.endswith("cpu_env.sh"):
                return  # what follows is another command
    python = [sys.executable] if script.endswith(".py") else []
    done = subprocess.run(
        [*python, str(ROOT / script), "--help"], capture_output=True, text=True, check=True
    )
    assert not {option for option in shown if not re.search(rf"{option}\b", done.stdout)}


@pytest.mark.parametrize("words", SERVERS, ids=" ".join)
def test_vllm_takes_the_flags_that_are_shown(words: list[str], tmp_path: Path) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    flags = [word for word in words[1:] if word != "..."]
    if "--config" in flags:
        place = flags.index("--config")
        config = yaml.safe_load((ROOT / flags[place + 1]).read_text())
        flags[place : place + 2] = as_flags(config)
    check(parser.parse_args(flags), tmp_path, any("lookahead" in flag for flag in flags))


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_vllm_takes_the_config_files(path: Path, tmp_path: Path) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    check(parser.parse_args(as_flags(yaml.safe_load(path.read_text()))), tmp_path, True)


def as_flags(config: dict[str, object]) -> list[str]:
    return [
        f"--{key}={json.dumps(value) if isinstance(value, dict) else value}"
        for key, value in config.items()
    ]


def check(args: object, folder: Path, asks: bool) -> None:
    """An engine of the tiny model would start with these arguments."""
    args.model = str(save_tokenizer(save_tiny_model("llama", folder)))  # type: ignore[attr-defined]
    args.max_model_len = 256  # type: ignore[attr-defined]
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    assert is_lookahead(config) is asks


def test_the_options_have_the_defaults_that_are_told() -> None:
    """Every option has a row, `name` | default, in one of the tables."""
    told = {
        name: default.strip("`")
        for page in PAGES
        for name, default in re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page.read_text(), re.M)
    }
    for field in fields(LookaheadOptions):
        default = getattr(LookaheadOptions(), field.name)
        assert told.get(field.name) == ("none" if default is None else json.dumps(default))


def test_the_tests_that_are_named_exist() -> None:
    """The README's table of features says by which test each is covered."""
    names = [
        (cell.partition("/")[0] if "/" in cell else "", name)
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith("|") and "test_" in line
        for cell in [line.split("|")[-2]]
        for name in re.findall(r"`([\w/]+\.py)`", cell)
    ]
    assert len(names) > 10
    for _, name in names:
        assert list((ROOT / "tests").rglob(Path(name).name)), name
        assert "/" not in name or (ROOT / "tests" / name).is_file(), name
