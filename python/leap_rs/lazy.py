"""Names of a package that are imported when they are first asked for.

So a command's help, and vLLM's processes, which import the package in every run, pay for what they use alone.
"""

from __future__ import annotations

import sys
from importlib import import_module

# As in `typing`, whose own import would take longer than all else that is needed here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def names(package: str, origins: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package, of the module that each name comes from.

    A name that comes from the module of that name is the module itself.
    """

    def get(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        origin = import_module(origins[name])
        value = origin if origins[name] == f"{package}.{name}" else getattr(origin, name)
        setattr(sys.modules[package], name, value)
        return value

    def known() -> list[str]:
        return sorted({*vars(sys.modules[package]), *origins})

    return get, known
