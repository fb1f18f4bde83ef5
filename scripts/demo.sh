#!/usr/bin/env bash
# Compare lookahead with plain vLLM on this machine: install what is missing, prepare the model, and
# run both servers. `scripts/demo.sh --help` lists the options.
set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$repo/scripts/setup.sh"
"$repo/.venv/bin/python" "$repo/scripts/prepare_model.py"
exec "$repo/.venv/bin/python" "$repo/scripts/demo.py" "$@"
