"""The rules whose strictness a user may choose, each at a level "error", "warn" or "off".

Documented limits (shapes, dtypes, buffers, engines) are not here: they are always errors. What only
devices have taught is in `rules/field_rules.toml`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Literal, TypeVar, cast

from .errors import NkiValidationError, NkiWarning, kernel_line
from .rules import FIELD_RULES, label

Level = Literal["error", "warn", "off"]
Plan = TypeVar("Plan")

DEFAULT_LEVELS: Final[dict[str, Level]] = {
    # SBUF and PSUM bytes that are live at once
    "capacity": "error",
    # an explicit SBUF address in the 16 KiB that AWS's allocators leave alone
    "reserved_sbuf": "warn",
    # reading a tile after another tile at an overlapping address was written
    "address_overlap": "error",
    "uninitialized_read": "error",
    # accumulate=True on PSUM that no matmul of an accumulation group wrote
    "psum_accumulation": "error",
    "start_partition": "error",
    # inputs outside the documented range of an activation function
    "activation_range": "error",
    # int32/uint32 values above 2**24 that go through fp32 arithmetic
    "inexact_integer": "error",
    # reading an engine's accumulator register that no instruction set
    "stale_accumulator": "error",
    # conflicting accesses of the two cores between barriers
    "core_race": "error",
    # several scattered rows with the same index in one DMA: AWS's kernels send padding to one row
    "scatter_duplicate": "warn",
    # dst and an operand overlap other than element by element: the result depends on timing
    "operand_overlap": "error",
    # a dynamic loop whose body Python state makes differ between trips: it is traced once
    "loop_state": "error",
    # a slice that ends outside its dimension, which NumPy would clip
    "slice_bounds": "error",
    # a list, dict, set or name outside of a kernel that its launch changes
    "purity": "error",
    # API that NKI 0.7 documents as deprecated
    "deprecated": "off",
    **{name: cast(Level, row.level) for name, row in FIELD_RULES.items()},
}

_levels: ContextVar[Mapping[str, Level]] = ContextVar("levels", default=DEFAULT_LEVELS)
"""Of this thread: another may launch kernels under other levels at the same time."""
_warned: set[tuple[str, str, int, str]] = set()
"""Rule, file, line and instruction of the warnings of this launch."""
_registries: dict[str, dict[Any, Any]] = {}
"""What Python has shown of each file: a launch does not repeat the warnings of the one before."""
_broken: list[int] = [0]
"""How many violations there were, at any level."""


def violations() -> int:
    """How many times a rule was broken so far, whatever its level: to see whether one was since."""
    return _broken[0]


class Plans(dict[object, Plan]):
    """Validated instructions by what their validation depends on: mostly operand layouts.

    A plan that breaks a rule is not kept: the next such instruction may meet another level.
    """

    def made(self, key: object, make: Callable[..., Plan], *args: Any) -> Plan:
        """The result of make(*args), kept under `key`."""
        before = _broken[0]
        plan = make(*args)
        if _broken[0] == before:
            self[key] = plan
        return plan


def level(rule: str) -> Level:
    """The level of `rule` now."""
    return _levels.get()[rule]


@contextmanager
def strict(field: Level | None = None, **levels: Level) -> Iterator[None]:
    """Set the levels of the named rules for the duration of a `with` block, in this thread.

    `field` is the level of all rules from the field that are not named. ValueError for an unknown
    rule or level.
    """
    if field is not None:
        levels = {**dict.fromkeys(FIELD_RULES, field), **levels}
    for rule, value in levels.items():
        if rule not in DEFAULT_LEVELS:
            raise ValueError(f"unknown rule {rule!r}; known: {sorted(DEFAULT_LEVELS)}")
        if value not in ("error", "warn", "off"):
            raise ValueError(f"level of {rule} is {value!r}; allowed: error, warn, off")
    before = _levels.get()
    _levels.set({**before, **levels})
    try:
        yield
    finally:
        _levels.set(before)


def violation(
    rule: str,
    message: str,
    error: type[NkiValidationError] = NkiValidationError,
    at: tuple[str, int] | None = None,
) -> None:
    """Raise `error`, warn, or do nothing, as the level of `rule` says.

    `at` is the kernel's file and line, None for the line that runs. A rule warns once per line and
    launch.
    """
    _broken[0] += 1
    now = _levels.get()[rule]
    if now == "off":
        return
    file, line = at or kernel_line()
    if now == "error":
        raise error(f"{message} (at {file}:{line}) [rule {label(rule)}]")
    key = rule, file, line, message.partition(" ")[0]
    if key not in _warned:
        _warned.add(key)
        registry = _registries.setdefault(file, {})
        text = f"{message} [rule {label(rule)}]"
        warnings.warn_explicit(text, NkiWarning, file, line, registry=registry)


def new_launch() -> None:
    """Lines that have warned may warn again."""
    _warned.clear()
