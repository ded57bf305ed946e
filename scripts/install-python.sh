#!/usr/bin/env bash
# Makes the virtual environment .venv with the development tools; may be run again at any time.
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
if ! "$python" -m pip --version >/dev/null 2>&1; then
    rm -rf .venv
    "${PYTHON:-python3}" -m venv .venv
fi
# Dependency groups need pip 25.1, newer than what some interpreters bring along.
"$python" -m pip install --quiet --retries 5 --upgrade 'pip>=25.1'
"$python" -m pip install --quiet --retries 5 --group dev
