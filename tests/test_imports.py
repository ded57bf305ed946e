"""What is imported before it is needed: nothing that takes long, for a help, a name, or a process of vLLM's."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

HEAVY = {"altair", "numpy", "polars", "pydantic", "rich", "scipy", "torch", "transformers", "vl_convert", "vllm"}
HELP = "import contextlib; from leap_rs.{}.command import main\nwith contextlib.suppress(SystemExit): main(['--help'])"
COMMANDS = ("calibrate", "fit", "record", "replay", "trace")


def loaded(code: str) -> set[str]:
    """The modules that there are in a new process when it has run `code`, but for those that Python starts with."""
    code = f"import sys; before = set(sys.modules)\n{code}\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("module", ["leap_rs", "leap_rs.commands"])
def test_the_package_is_next_to_nothing(module: str) -> None:
    found = loaded(f"import {module}")
    assert {name for name in found if name.startswith("leap_rs")} == {"leap_rs", "leap_rs.lazy", module}
    assert not found & {*HEAVY, "typing", "typer"}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_loads_nothing_heavy(name: str) -> None:
    assert not loaded(f"import leap_rs.{name}.command") & HEAVY
    assert not loaded(HELP.format(name)) & HEAVY


def test_the_plugin_loads_nothing_heavy_where_nobody_asks_for_it() -> None:
    assert not loaded("import leap_rs.vllm.plugin") & {*HEAVY, "typer"}


@pytest.mark.parametrize("name", ["leap_rs", "leap_rs.calibrate", "leap_rs.replay", "leap_rs.trace"])
def test_every_name_is_there_and_no_other(name: str) -> None:
    package = importlib.import_module(name)
    assert set(package.__all__) <= set(dir(package))
    # In a process that has not asked for any of them yet.
    told = f"from {name} import *; print(*sorted(set(globals()) - set(dir(__builtins__))))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert set(package.__all__) - {"__version__"} <= set(done.stdout.split())
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nonsense'"):
        _ = package.nonsense
