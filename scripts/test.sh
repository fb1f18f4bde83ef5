#!/usr/bin/env bash
# Install what is missing, then check style and types and run the whole test suite.
# Arguments go to pytest: scripts/test.sh tests/draft -k tree
# Without any, five minutes of random requests come last, under a seed that is printed.
set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$repo"
scripts/setup.sh
.venv/bin/python scripts/prepare_model.py

# Every check runs, so that one run shows all there is to mend.
status=0
check() { echo "==> $*"; "$@" || status=1; }

check .venv/bin/ruff check .
check .venv/bin/ruff format --check .
check .venv/bin/mypy
check scripts/cpu_env.sh .venv/bin/python -m pytest "$@"
[[ $# -gt 0 ]] || check scripts/cpu_env.sh .venv/bin/python scripts/fuzz.py --minutes 5
exit "$status"
