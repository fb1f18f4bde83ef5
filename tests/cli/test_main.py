"""The console command: its help is quick, its subcommands are those listed, scripts call it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lookahead_vllm
from lookahead_vllm.cli.main import COMMANDS, main
from tests.support.files import jsonl

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)


def test_help_has_a_line_for_each_command_and_imports_nothing_large():
    code = (
        "import sys\n"
        "from lookahead_vllm.cli.main import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "finally:\n"
        "    print(sorted({'vllm', 'torch', 'numba', 'transformers'} & sys.modules.keys()))\n"
    )
    lines = run("-c", code).stdout.splitlines()
    assert lines[-1] == "[]"
    for name, text in COMMANDS.items():
        assert any(line.split() == [name, *text.split()] for line in lines)


def test_a_reader_that_has_enough_is_no_error():
    """As `| head`: the pipe is closed when the command writes."""
    done = run(
        "-c",
        "import os, sys, types\n"
        "end, pipe = os.pipe()\n"
        "os.close(end)\n"
        "os.dup2(pipe, 1)\n"
        "from lookahead_vllm.cli.main import main\n"
        "command = types.SimpleNamespace(main=lambda arguments: print('a row') or 1)\n"
        "sys.modules['lookahead_vllm.cli.check'] = command\n"
        "sys.exit(main(['check']))\n",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_the_package_s(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"{lookahead_vllm.__version__}\n"


def test_names_that_cannot_be_encoded_lose_no_results(tmp_path, capsys):
    line = {"prompt_token_ids": [1], "output_token_ids": [2, 3, 4]}
    traces = tmp_path / "in Latin-1: \udce9.jsonl"
    jsonl(traces, {**line, "category": "a\ud800"}, {**line, "category": "b"})
    out = tmp_path / "out.json"
    more = ["--proposers", "ngram_trie", "--budget", "4", "--json", str(out)]
    assert main(["simulate", "--traces", str(traces), *more]) == 0
    printed = capsys.readouterr().out
    assert r"in Latin-1: \udce9.jsonl: 2 answers" in printed and r"a\ud800" in printed
    (of_budget,) = json.loads(out.read_text())["results"].values()
    assert of_budget["4"]["cold"]["by_category"].keys() == {"a\ud800", "b"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "are required: COMMAND"), (["chekc"], "argument COMMAND: invalid choice: 'chekc'")],
)
def test_without_a_known_command_the_status_is_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
