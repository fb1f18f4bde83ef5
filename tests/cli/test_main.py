"""The console command: its help is quick, its subcommands are those listed, scripts call it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lookahead_vllm
from lookahead_vllm.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)


def test_help_has_a_line_for_each_command_and_imports_nothing_large() -> None:
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


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert not stopped.value.code
    assert capsys.readouterr().out.startswith(f"usage: lookahead-vllm {command} [-h]")


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"{lookahead_vllm.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "are required: COMMAND"), (["chekc"], "argument COMMAND: invalid choice: 'chekc'")],
)
def test_without_a_known_command_the_status_is_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (["warm_cache.py", "--texts", "a"], "lookahead-vllm cache build: error: "),
        (["warm_cache.py", "--info", "/no/file"], "lookahead-vllm cache info: error: /no/file: No"),
        (["simulate.py"], "lookahead-vllm simulate: error: the following arguments are required"),
        (["check_seams.py", "/no"], "/no is no wheel, and no folder with the package `vllm`"),
    ],
)
def test_scripts_call_the_command(script: list[str], error: str) -> None:
    name, *arguments = script
    finished = run(str(ROOT / "scripts" / name), *arguments)
    assert finished.returncode == 2 and error in finished.stderr
