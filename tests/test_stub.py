"""The stub says what the compiled module has, name for name and signature for signature."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_stub_agrees_with_the_module(tmp_path: Path) -> None:
    # PyO3 writes __all__ from what the module registers; stubtest compares the names themselves anyway.
    allowed = tmp_path / "allowed.txt"
    allowed.write_text(r"leap_rs\._leap\.__all__" + "\n")
    config = ROOT / "pyproject.toml"
    options = ["--mypy-config-file", config, "--allowlist", allowed, "--ignore-unused-allowlist"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "leap_rs._leap", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Success: no issues found in 1 module" in done.stdout
