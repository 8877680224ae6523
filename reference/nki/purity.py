"""Rule purity: whether a launch changed what lies outside of its kernel.

The device keeps a compiled kernel by shapes, dtypes and values of its arguments, so a kernel must
depend on those alone and leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from .outside import Outside, noted
from .strict import level, violation

_noted: WeakKeyDictionary[Callable[..., Any], Outside] = WeakKeyDictionary()


def outside_of(kernel: Callable[..., Any], arguments: Iterable[object]) -> Outside | None:
    """Note what lies outside before a launch; None when rule purity is off.

    Functions among the arguments belong to the kernel. What was noted for the launch before is used
    again while nothing has changed.
    """
    if level("purity") == "off":
        return None
    functions = [value for value in arguments if callable(value)]
    known = None if functions else _noted.get(kernel)
    if known is not None and next(known.changes(), None) is None:
        return known
    found = noted(kernel, *functions)
    if not functions:
        _noted[kernel] = found
    return found


def check_unchanged(outside: Outside | None, kernel: str) -> None:
    """Rule purity: the launch left everything outside as it was."""
    for _, place, what in outside.changes() if outside is not None else ():
        violation(
            "purity",
            f"kernel {kernel} changes {what}: the device runs a kernel as it was compiled once; "
            "give it as an argument, or return the value",
            at=place,
        )
