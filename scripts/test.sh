#!/usr/bin/env bash
# Install what is missing, then check style and types and run the tests.
#
#   scripts/test.sh                      everything: 15 to 25 minutes on two cores
#   scripts/test.sh --quick              style, types, and the tests without an engine: 3 minutes
#   scripts/test.sh tests/draft -k tree  style, types, and these arguments for pytest
#
# Without arguments, two minutes of random requests come last, with a random seed that is printed.
set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$repo"

needs_model=true
fuzz_minutes=0
# Files are shared out to this many processes, each with its own cores (tests/conftest.py).
cores="$(nproc)"
parallel=(-n "$((cores < 4 ? cores : 4))" --dist loadfile --no-loadscope-reorder)
# Tests that start no engine and no server; the slowest of those are left out too.
quick=(
    tests/options tests/draft tests/verify tests/simulation tests/cli tests/benchmarks
    tests/engine/test_compatibility.py
    tests/engine/step/test_placed_trees.py
    tests/test_imports.py --ignore=tests/verify/test_triton_compiles.py
    -m "not slow and not model"
)
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 0
elif [[ ${1:-} == --quick ]]; then
    shift
    set -- "${parallel[@]}" "${quick[@]}" "$@"
    needs_model=false
    echo "==> style, types and the tests without an engine: about 3 minutes on two cores" >&2
elif [[ $# -eq 0 ]]; then
    set -- "${parallel[@]}"
    fuzz_minutes=2
    echo "==> all checks and tests: 15 to 25 minutes on two cores (--quick: about 3)" >&2
fi

scripts/setup.sh
[[ $needs_model == false ]] || .venv/bin/python scripts/prepare_model.py

# Beside the checks of style and types, as beside the start of a server, the kernels are compiled.
tail -f /dev/null --pid=$$ | .venv/bin/python -m lookahead_vllm.compilation '[{"proposer": "hybrid"}, true]' &

# All checks run, even if one fails.
status=0
check() { echo "==> $*"; "$@" || status=1; }

check .venv/bin/ruff check .
check .venv/bin/ruff format --check .
check .venv/bin/mypy
check scripts/cpu_env.sh .venv/bin/python -m pytest "$@"
[[ $fuzz_minutes == 0 ]] || check scripts/cpu_env.sh .venv/bin/python scripts/fuzz.py --minutes "$fuzz_minutes"
exit "$status"
