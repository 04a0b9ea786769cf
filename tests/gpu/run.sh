#!/usr/bin/env bash
# All that only a GPU can show, on a machine with one: tests/gpu/run.sh [--dry-run] [--only NAME ...]
# Needs Python 3.11 with torch for CUDA, triton, numpy, msgspec, xxhash, llguidance and nixl; takes nothing from the network.
# Uses PYTHON, or .venv, or python3. Prints one table; writes it as $OUT/gpu.md, too, when OUT is set.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="${PYTHON:-}"
if [[ -z "$python" ]]; then
    if [[ -x "$root/.venv/bin/python" ]]; then python="$root/.venv/bin/python"; else python="$(command -v python3)"; fi
fi
# Tandem's folders under their real names, where it is not installed.
links="$(mktemp -d)"
trap 'rm -rf "$links"' EXIT
mkdir "$links/tandem"
for folder in kernels workers router cluster; do ln -s "$root/$folder" "$links/tandem/$folder"; done
export PYTHONPATH="$links:$root/tests/gpu" PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1
exec_status=0
timeout 470 "$python" "$root/tests/gpu/check.py" "$@" || exec_status=$?
exit "$exec_status"
