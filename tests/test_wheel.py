"""The wheel brings its linear algebra along: it works in an empty environment without a BLAS of the system."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

USE = """
import sys
from pathlib import Path

import numpy as np

import leap_rs

rng = np.random.default_rng(7)
n, d, lam, budget = 300, 12, 5.0, 4096
x = rng.normal(size=(n, d)).astype(np.float32)
lengths = np.clip(np.round((12 + x @ rng.normal(size=d) + rng.normal(size=n)) ** 2), 1, budget)

readout = leap_rs.Readout.fit(x, lengths, max_tokens=budget, lam=lam)
u = np.c_[(x - x.mean(0, dtype=float)) / x.std(0, dtype=float), np.ones(n)]
penalty = lam * np.diag(np.r_[np.ones(d), 0.0])
theta = np.linalg.solve(u.T @ u + penalty, u.T @ np.sqrt(lengths))
np.testing.assert_allclose(readout.predict(x), np.clip(u @ theta, 1, budget**0.5) ** 2, rtol=1e-3)

requests = 60
frame = leap_rs.read_trace(sys.argv[1])
policies = ("fcfs", "sjf-oracle")
result = leap_rs.replay(sys.argv[1], policies=policies, load=1.2, seeds=2)
assert sorted(result.summary["policy"]) == sorted(policies), result.summary
assert result.requests.height == frame.height * len(policies) * 2, result.requests
assert (result.requests["arrival_s"] < result.requests["first_token_s"]).all()
assert (result.requests["first_token_s"] <= result.requests["finish_s"]).all()

print(leap_rs._leap.__file__)
for line in Path("/proc/self/maps").read_text().splitlines():
    if ".so" in line:
        print(line.split()[-1])
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    # A make that runs the tests must not lend its job slots, nor the tests' environment its packages.
    strange = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHONPATH", "LD_LIBRARY_PATH"}
    clean = {name: value for name, value in os.environ.items() if name not in strange}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    run("make", "wheel", f"PYTHON={sys.executable}")
    (found,) = (ROOT / "dist").glob("*.whl")
    return found


def test_wheel_is_portable_and_complete(wheel: Path) -> None:
    assert "-cp310-abi3-manylinux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    carried = [Path(name).name for name in names if ".libs/" in name]
    assert any(name.startswith("libopenblas") for name in carried), carried
    assert any(name.startswith("libgfortran") for name in carried), carried
    assets = ("leap_rs/replay/page/page.css", "leap_rs/replay/page/page.js")
    for needed in ("leap_rs/py.typed", "leap_rs/_leap.pyi", *assets):
        assert needed in names


def test_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path.resolve() / "venv"
    run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--retries", "5", wheel)

    trace = tmp_path / "trace.parquet"
    made = "import sys, leap_rs, polars; leap_rs.write_trace(polars.read_csv(sys.argv[1]), sys.argv[2], model='none')"
    rows = [f"{i * 0.05:.2f},{20 + i % 7},{1 + (i * 37) % 200}" for i in range(60)]
    source = tmp_path / "trace.csv"
    source.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    run(python, "-c", made, source, trace, cwd=tmp_path)

    extension, *loaded = run(python, "-I", "-c", USE, trace, cwd=tmp_path).splitlines()
    numeric = {Path(name) for name in loaded if any(word in name for word in ("blas", "lapack", "gfortran"))}
    assert any("leap_rs.libs" in str(name) for name in numeric), loaded
    assert [name for name in numeric if environment not in name.parents] == []

    linked = run("ldd", extension)
    assert "not found" not in linked
    outside = [line for line in linked.splitlines() if " => " in line and str(environment) not in line]
    assert [line for line in outside if any(word in line for word in ("blas", "lapack", "gfortran"))] == []
