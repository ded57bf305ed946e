#!/usr/bin/env bash
# Runs the tests of the plugin that need no engine on the schedulers of the versions of vLLM that it claims to work with, one
# after another. A wheel's Python files are enough for them: they are laid over .venv-vllm, whose torch all share, and kept
# in .cache (60 to 180 MB a version). The wheels are those for GPUs, since not every version has a CPU build.
# VERSIONS chooses others, arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p .cache
python=${PYTHON:-.venv-vllm/bin/python}
path=${PYTHONPATH:-}
failed=
for version in ${VERSIONS:-0.20.2 0.26.0 0.30.0 0.33.0}; do
    tree=$PWD/.cache/vllm-versions/$version
    if [ ! -d "$tree" ]; then
        made=$(mktemp -d "$PWD/.cache/vllm-XXXXXX")
        trap 'rm -rf "$made"' EXIT
        "$python" -m pip download --quiet --retries 5 --no-deps --only-binary :all: --dest "$made" "vllm==$version"
        "$python" - "$made" <<'PYTHON'
import sys
from pathlib import Path
from zipfile import ZipFile

made = Path(sys.argv[1])
for wheel in made.glob("*.whl"):
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".so")]
        archive.extractall(made / "tree", names)
PYTHON
        mkdir -p "${tree%/*}"
        mv "$made/tree" "$tree"
        rm -rf "$made"
    fi
    export PYTHONPATH=$tree${path:+:$path}
    # Else the tests could pass on the environment's own.
    "$python" -c "import vllm; assert vllm.__version__ == '$version', vllm.__file__"
    echo "vLLM $version"
    "$python" -m pytest -q tests/vllm "$@" || failed+=" $version"
done
[ -z "$failed" ] || { echo "tests failed on vLLM$failed" >&2; exit 1; }
