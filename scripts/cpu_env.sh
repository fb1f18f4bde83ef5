#!/usr/bin/env bash
# Run a command with the CPU runtime that vLLM recommends:
#
#   scripts/cpu_env.sh .venv/bin/python my_benchmark.py
#
# It preloads Intel's OpenMP and tcmalloc; without the first, speculation on a CPU loses much of its
# speed. The demo, the tests and the benchmarks all run with it, so that they measure and test the
# same thing. The preloads apply to the command only, not to your shell.
set -euo pipefail

if [[ $# -eq 0 || $1 == -* ]]; then
    sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi

preload=()

# libiomp5.so is in lib/ of a virtual environment: the command's, the active one, or .venv here.
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
for prefix in "$(dirname "$(command -v "$1" || true)")/.." "${VIRTUAL_ENV:-}" "$repo/.venv"; do
    if [[ -n $prefix && -e $prefix/lib/libiomp5.so ]]; then
        preload+=("$(cd "$prefix/lib" && pwd)/libiomp5.so")
        break
    fi
done

# tcmalloc is installed by the system: Debian and Ubuntu call the package libtcmalloc-minimal4.
for file in /usr/lib/*-linux-gnu/libtcmalloc_minimal.so.4 /usr/lib64/libtcmalloc_minimal.so.4; do
    if [[ -e $file ]]; then
        preload+=("$file")
        break
    fi
done

for file in "${preload[@]}"; do
    if [[ ":${LD_PRELOAD:-}:" != *":$file:"* ]]; then
        LD_PRELOAD="${LD_PRELOAD:+$LD_PRELOAD:}$file"
    fi
done

export VLLM_NO_USAGE_STATS="${VLLM_NO_USAGE_STATS:-1}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
if [[ -n ${LD_PRELOAD:-} ]]; then
    exec env LD_PRELOAD="$LD_PRELOAD" "$@"
fi
exec "$@"
