#!/usr/bin/env bash
# All that only a GPU can show, on a machine with one: tests/gpu/run.sh [--dry-run] [--list] [--only NAME ...]
#
# Takes nothing from the network. Needs a Python of 3.11 or newer that has torch for CUDA, triton, numpy, msgspec, xxhash,
# llguidance, safetensors, psutil and platformdirs (and nixl-cu12 or nixl-cu13 for KV between processes), and a C compiler,
# with which triton builds its launchers. That Python is PYTHON, or the first of .venv/bin/python, python3 and python that
# has them; PYTHONPATH may name a folder with packages that it lacks (pip install --target).
#
# --dry-run needs no GPU: the smallest case of each check, in triton's interpreter, in the same processes and under the
# same limits. Prints one table, and writes it as $OUT/gpu.md where OUT is set. Ends within 8 minutes whatever happens.
set -euo pipefail
main() {  # as a whole: whoever edits this file meanwhile does not disturb a run
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
    here="$root/tests/gpu"
    python="" reasons=""
    candidates=("$root/.venv/bin/python" python3 python)
    if [[ -n "${PYTHON:-}" ]]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if ! command -v "$candidate" > /dev/null; then
            reasons+=" $candidate is not there;"
        elif lacks="$("$candidate" "$here/prerequisites.py" "$@" 2>&1)"; then
            python="$candidate"
            break
        else
            reasons+=" $candidate lacks ${lacks##*$'\n'};"
        fi
    done
    if [[ -z "$python" ]]; then
        echo "nothing was checked:$reasons set PYTHON to one that has them" >&2
        exit 2
    fi
    # Tandem's folders under their real names, where it is not installed.
    links="$(mktemp -d)"
    trap 'rm -rf "$links"' EXIT
    mkdir "$links/tandem"
    for folder in kernels workers router cluster; do ln -s "$root/$folder" "$links/tandem/$folder"; done
    export PYTHONPATH="$links:$here${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1
    status=0
    timeout --kill-after=15 460 "$python" "$here/check.py" "$@" || status=$?
    exit "$status"
}
main "$@"
