#!/usr/bin/env bash
# Lookahead against plain vLLM, on this machine: installs what is missing, prepares the model and
# runs both servers. `scripts/demo.sh --help` lists the options.
set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$repo/scripts/setup.sh"
"$repo/.venv/bin/python" "$repo/scripts/prepare_model.py"
exec "$repo/.venv/bin/python" "$repo/scripts/demo.py" "$@"
