#!/usr/bin/env bash
# Runs the quick Python tests on the built wheel with the lowest versions of the dependencies that it claims to work with.
set -euo pipefail
cd "$(dirname "$0")/.."

lowest=target/lowest
rm -rf "$lowest"
mkdir -p target
"${PYTHON:-python3}" -m venv "$lowest"
.venv/bin/python scripts/lowest.py >"$lowest/constraints.txt"
cat "$lowest/constraints.txt"
"$lowest/bin/python" -m pip install --quiet --retries 5 --upgrade 'pip>=25.1'
wheel=$(echo dist/*.whl)
"$lowest/bin/python" -m pip install --quiet --retries 5 --constraint "$lowest/constraints.txt" "$wheel[report,text]" --group test
env -u VIRTUAL_ENV "$lowest/bin/python" -m pytest -m 'not slow' -o filterwarnings=default --ignore tests/test_stub.py "$@"
