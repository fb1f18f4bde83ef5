"""The README and the docs name commands, options, files and messages that exist."""

import ast
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import vllm
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from lookahead_vllm.cli.main import main
from lookahead_vllm.engine import plugin
from lookahead_vllm.engine.config import is_lookahead
from lookahead_vllm.options.request import FLAT
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.drafters import CONFIGS
from tests.support.models import save_config, save_tiny_model
from tests.support.tokenizer import save_tokenizer

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]

plugin.register()


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """The name of the page and the text of every fenced block of a language."""
    for page in PAGES:
        fence = rf"^( *)```{language}\n(.*?)^\1```"  # indented in a list
        for found in re.finditer(fence, page.read_text(), re.M | re.S):
            yield page.name, textwrap.dedent(found[2])


def commands() -> Iterator[list[str]]:
    """The words of every command in a block for the shell, without variables set in front."""
    for _, block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield words


COMMANDS = list(commands())
SERVERS = [
    words[place + 1 :]
    for words in COMMANDS
    for place, word in enumerate(words)
    if word == "serve" and words[place - 1].endswith("vllm")
]
SERVERS += [words[words.index("lookahead-vllm") + 1 :] for words in COMMANDS if "run" in words]
CONSOLE = [words[1:] for words in COMMANDS if words[0] == "lookahead-vllm"]


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
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


def test_all_pages_are_listed():
    text = (DOCS / "README.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in text, page.name


def test_the_offline_example_starts_however_much_memory_is_free(monkeypatch):
    """On a CPU, vLLM checks the free memory unless the KV cache has a size."""
    readme = (ROOT / "README.md").read_text()
    (example,) = (text for _, text in blocks("python") if text.startswith("from vllm import LLM"))
    llm = MagicMock()
    monkeypatch.setattr(vllm, "LLM", llm)
    exec(example, {"__name__": "__main__"})
    ((model,), options) = llm.call_args
    assert f"vllm serve {model} " in readme
    assert options["kv_cache_memory_bytes"] <= 2**30


def test_blocks_can_be_read():
    for page, block in blocks("python"):
        ast.parse(block, page)
    for _, block in blocks("yaml"):
        assert yaml.safe_load(block)
    for _, block in blocks("bash"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)


def test_files_that_are_named_exist():
    for words in COMMANDS:
        for place, word in enumerate(words):
            if re.match(r"(\./)?(scripts|docker|configs)/", word):
                path = ROOT / word
                assert path.exists(), word
                # A script is run by itself unless it is the argument of one of these.
                is_run = place == 0 or not words[place - 1].endswith(("python", "-f", "--config"))
                assert not is_run or path.stat().st_mode & 0o100, f"{word} cannot be run"


SCRIPTS = sorted({word for words in COMMANDS for word in words if word.startswith("scripts/")})


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_take_the_options_that_are_shown(script):
    if script.endswith("cpu_env.sh"):
        return  # its arguments are another command
    shown = set()
    for words in COMMANDS:
        cut = words.index("--") if "--" in words else len(words)
        own, passed_on = words[:cut], words[cut + 1 :]  # to bench.py, by gpu_check.py
        given = own[own.index(script) + 1 :] if script in own else []
        if script.endswith("/bench.py"):
            given += passed_on
        shown |= {word.partition("=")[0] for word in given if word.startswith("--")}
    python = [sys.executable] if script.endswith(".py") else []
    done = subprocess.run(
        [*python, str(ROOT / script), "--help"], capture_output=True, text=True, check=True
    )
    assert not {option for option in shown if not re.search(rf"{option}\b", done.stdout)}


@pytest.mark.parametrize("words", CONSOLE, ids=" ".join)
def test_the_console_command_takes_what_is_shown(words, capsys):
    subcommand = words[: 2 if words[0] == "cache" else 1]
    with pytest.raises(SystemExit) as ended:
        main([*subcommand, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: lookahead-vllm {' '.join(subcommand)} ")
    assert all(re.search(rf"{word}\b", text) for word in words if word.startswith("--"))


@pytest.mark.parametrize("words", SERVERS, ids=" ".join)
def test_vllm_takes_the_flags_that_are_shown(words, tmp_path):
    parser = make_arg_parser(FlexibleArgumentParser())
    flags = [word for word in words[1:] if word != "..."]
    if "--config" in flags:
        place = flags.index("--config")
        config = yaml.safe_load((ROOT / flags[place + 1]).read_text())
        flags[place : place + 2] = as_flags(config)
    head = str(save_config("eagle3", tmp_path, CONFIGS))
    flags = [flag.replace("HEAD", head) for flag in flags]
    check(parser.parse_args(flags), tmp_path, any("lookahead" in flag for flag in flags))


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_vllm_takes_the_config_files(path, tmp_path):
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


def test_paths_in_the_text_exist():
    """Paths are relative to the repository or the package; in features.md also to `tests/`."""
    for page in PAGES[:1] + PAGES[2:]:
        for path in re.findall(
            r"`((?:\w+/)+[\w-]+\.(?:py|sh|cpp|md|yaml|json))`", page.read_text()
        ):
            folders = [ROOT, ROOT / "lookahead_vllm"]
            if page.name == "features.md":
                folders.append(ROOT / "tests")
            assert any((folder / path).is_file() for folder in folders), f"{page.name}: {path}"


def test_files_that_the_code_names_exist():
    """By their names, or by paths relative to the repository, the package or their own folder."""
    package = ROOT / "lookahead_vllm"
    names = {
        path.name
        for folder in (package, ROOT / "scripts", ROOT / "tests")
        for path in folder.rglob("*.*")
    }
    for source in [*package.rglob("*.py"), ROOT / "scripts" / "test.sh"]:
        text = source.read_text()
        for path in re.findall(r"`((?:\w+/)*\w+\.(?:py|sh|cpp|md))`|(tests/[\w/]+\.py)", text):
            name = path[0] or path[1]
            folders = [ROOT, package, package / "engine", source.parent]
            found = any((folder / name).is_file() for folder in folders)
            assert found or ("/" not in name and name in names), f"{source}: {name}"


def rows(page: Path) -> dict[str, str]:
    """Of every table row `name` | default | ...: the name, and the default without backticks."""
    found = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page.read_text(), re.M)
    return {name: default.strip("`") for name, default in found}


def test_all_options_are_listed_with_their_defaults():
    options = asdict(LookaheadOptions())
    defaults = {k: "none" if v is None else json.dumps(v) for k, v in options.items()}
    listed = rows(DOCS / "configuration.md")
    assert {name: listed.get(name) for name in defaults} == defaults
    assert set(FLAT) <= listed.keys()
    in_readme = rows(ROOT / "README.md")
    assert len(in_readme) == 5 and in_readme.items() <= defaults.items()


def texts_of_sources() -> str:
    """All strings of the package's sources; "{}" where a value is filled in."""
    texts = []
    for path in (ROOT / "lookahead_vllm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_the_messages_that_are_explained_exist():
    """In the tables of messages, `...` stands for a value; a few messages are vLLM's."""
    text = texts_of_sources() + (
        "unrecognized arguments: --speculative-model Input should be 'ngram'"
        "is less than desired CPU memory utilization Not enough allowed NUMA nodes"
    )
    cells = re.findall(r"^\| (`.*`) \| ", (DOCS / "troubleshooting.md").read_text(), re.M)
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 30
    for message in messages:
        for part in message.split("..."):
            assert part.strip(" ,:") in text, message
