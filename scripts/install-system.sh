#!/usr/bin/env bash
# Installs the system packages that the build needs, with the argument `browser` also those of the tests of the replay's
# page, with `vllm` those that vLLM compiles models with; nothing when they are all there.
set -euo pipefail

python=${PYTHON:-python3}

if ! command -v cargo >/dev/null; then
    echo "cargo is missing: install a Rust toolchain (1.88 or newer) first" >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo "$python is missing or older than 3.10: name another one with PYTHON=..." >&2
    exit 1
fi

missing=()
command -v gcc >/dev/null || missing+=(gcc libc6-dev)
command -v pkg-config >/dev/null || missing+=(pkg-config)
pkg-config --exists openblas 2>/dev/null || missing+=(libopenblas-dev)
"$python" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
if [ "${1:-}" = browser ]; then
    command -v chromium >/dev/null || command -v google-chrome >/dev/null || missing+=(chromium)
    command -v chromedriver >/dev/null || missing+=(chromium-driver)
fi
if [ "${1:-}" = vllm ]; then
    command -v g++ >/dev/null || missing+=(g++)
    "$python" -c 'import sys, sysconfig; from pathlib import Path; sys.exit(not Path(sysconfig.get_path("include"), "Python.h").is_file())' ||
        missing+=(python3-dev)
fi
[ ${#missing[@]} -eq 0 ] && exit 0

# Targets of make that need packages may run beside each other; apt ends where another one runs.
exec 9<"$0"
flock 9

if ! command -v apt-get >/dev/null; then
    echo "please install the equivalents of these Debian packages: ${missing[*]}" >&2
    exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    as_root=(sudo)
fi
echo "installing ${missing[*]}"
"${as_root[@]}" apt-get -q -o Acquire::Retries=3 update
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get -q -o Acquire::Retries=3 install -y --no-install-recommends "${missing[@]}"
