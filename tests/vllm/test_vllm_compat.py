"""Which vLLM the plugin accepts, warns of, and refuses."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from leap_rs import ConfigError
from leap_rs.vllm import compat


def classes(*, gate: bool = True, skipped: bool = False, without: str = "") -> tuple[Any, Any]:
    """Classes with the names that vLLM's have, less one."""
    scheduler_names = [name for name in compat.ATTRIBUTES if name != without] + ["skipped_waiting"] * skipped
    request_names = [name for name in compat.REQUEST if name != without] + ["next_decode_eligible_step"] * gate
    methods = [name for name in compat.METHODS if name not in (without, "schedule")]
    properties = [name for name in compat.REQUEST_PROPERTIES if name != without]
    made: dict[str, Any] = {}
    text = "class Scheduler:\n    def __init__(self):\n"
    text += "".join(f"        self.{name} = None\n" for name in scheduler_names)
    text += "    def schedule(self):\n        return self.x" + (".next_decode_eligible_step\n" if gate else "\n")
    text += "".join(f"    def {name}(self): pass\n" for name in methods)
    text += "class Request:\n    def __init__(self):\n" + "".join(
        f"        self.{name} = 0\n" for name in request_names
    )
    text += "".join(f"    def {name}(self): pass\n" for name in properties)
    exec(text, made)
    return made["Scheduler"], made["Request"]


@pytest.mark.parametrize(
    ("text", "version", "tested"),
    [
        ("0.20.0", (0, 20), True),
        ("0.32.0+cpu", (0, 32), True),
        ("v0.33.1rc2", (0, 33), True),
        ("0.19.1", (0, 19), False),
        ("0.34.0", (0, 34), False),
        ("1.0.0", (1, 0), False),
        ("0.1.dev1+g1234", None, False),
        ("dev", None, False),
    ],
)
def test_versions(text: str, version: tuple[int, int] | None, tested: bool) -> None:
    assert compat.version_of(text) == version
    assert compat.tested(version) is tested


@pytest.mark.parametrize("text", ["0.19.0", "0.40.1", "dev"])
def test_outside_the_range_is_a_warning(text: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.leap_rs"):
        compat.check(SimpleNamespace(__version__=text), *classes())
    assert f"vLLM {text} is outside" in caplog.text
    assert "0.20 to 0.33" in caplog.text


def test_inside_the_range_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    engine = compat.check(SimpleNamespace(__version__="0.32.0"), *classes())
    assert engine == compat.Engine((0, 32), gate_by_step=True, skipped_queue=False, gated_adapters=False)
    old = compat.check(SimpleNamespace(__version__="0.20.2"), *classes(gate=False, skipped=True))
    assert old == compat.Engine((0, 20), gate_by_step=False, skipped_queue=True, gated_adapters=False)
    new = compat.check(SimpleNamespace(__version__="0.33.0"), *classes())
    assert new == compat.Engine((0, 33), gate_by_step=True, skipped_queue=False, gated_adapters=True)
    assert not caplog.records


@pytest.mark.parametrize("name", [*compat.METHODS[1:], *compat.ATTRIBUTES, *compat.REQUEST, *compat.REQUEST_PROPERTIES])
def test_a_missing_name_is_an_error_that_says_which(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"vLLM 0\.32\.0 lacks .*\b{name}\b.*tested with vLLM 0\.20 to 0\.33"):
        compat.check(SimpleNamespace(__version__="0.32.0"), *classes(without=name))
