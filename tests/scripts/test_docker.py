"""What the container files name is there; no engine for containers is needed to see that."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from lookahead_vllm.engine import release

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = ["Dockerfile", "Dockerfile.cpu"]
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())


def instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (DOCKER / name).read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_copied_is_there_and_in_the_context(name: str) -> None:
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


def test_the_gpu_image_is_the_supported_release_and_keeps_its_entrypoint() -> None:
    found = instructions("Dockerfile")
    version = next(rest for name, rest in found if name == "ARG")
    assert version.removeprefix("VLLM_VERSION=v").rpartition(".")[0] in release.SUPPORTED
    assert [rest for name, rest in found if name == "FROM"] == [
        "vllm/vllm-openai:${VLLM_VERSION} AS wheel",
        "vllm/vllm-openai:${VLLM_VERSION}",
    ]
    assert not {"ENTRYPOINT", "CMD"} & {name for name, _ in found}
    install = [rest for name, rest in found if name == "RUN"][-1]
    assert "--no-deps" in install  # vLLM's own torch stays
    exec(shlex.split(install)[-1])  # what the image is asked when it is built


def test_the_cpu_image_runs_scripts_that_exist() -> None:
    entrypoint = json.loads(dict(instructions("Dockerfile.cpu"))["ENTRYPOINT"])
    folder = "/opt/lookahead-vllm/"
    assert entrypoint[1:] == ["vllm", "serve"] and entrypoint[0].startswith(folder)
    for script in (entrypoint[0].removeprefix(folder), "scripts/setup.sh"):
        assert (ROOT / script).stat().st_mode & 0o100, f"{script} cannot be run"


def test_compose_mounts_what_is_there_and_prometheus_asks_the_server() -> None:
    for name, service in COMPOSE["services"].items():
        for volume in service.get("volumes", []):
            source, target = volume.split(":")[:2] if "${" not in volume else ("/", "/models")
            if source.startswith("."):
                assert (DOCKER / source).is_file(), f"{name} mounts {source}"
                assert Path(target).suffix == Path(source).suffix
        build = service.get("build")
        if build:
            assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
            assert service["networks"]["default"]["aliases"] == ["server"]
            assert service["ports"] == ["8000:8000"]
    scraped = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"] == [{"targets": ["server:8000"]}]


def test_grafana_finds_its_source_and_its_dashboard() -> None:
    (source,) = yaml.safe_load((DOCKER / "grafana" / "datasources.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090"
    assert "prometheus" in COMPOSE["services"]
    dashboards = yaml.safe_load((DOCKER / "grafana" / "dashboards.yaml").read_text())
    folder = dashboards["providers"][0]["options"]["path"]
    grafana = COMPOSE["services"]["grafana"]
    targets = [volume.split(":")[1] for volume in grafana["volumes"]]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in targets and str(Path(home).parent) == folder
