"""Loops of NKI: dynamic device loops run eagerly, the static ranges are Python's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, SupportsIndex

from . import trace
from .core import current
from .errors import NkiValidationError
from .records import LoopEdge
from .registers import VirtualRegister, integer
from .strict import violation


def _check_step(name: str, step: Any) -> int:
    if isinstance(step, VirtualRegister) or not isinstance(step, SupportsIndex):
        raise NkiValidationError(f"{name}: step must be a compile-time integer, got {step!r}")
    if step.__index__() < 1:
        raise NkiValidationError(f"{name}: step {step!r}; allowed: >= 1")
    return step.__index__()


def _mark(edge: LoopEdge, *bounds: object) -> None:
    """Record an edge of a loop; registers among its bounds are read."""
    core = current()
    if core.in_no_reorder:
        raise NkiValidationError("a dynamic loop inside nl.no_reorder() is not supported")
    if trace.active is not None:
        reads = tuple([b.access for b in bounds if isinstance(b, VirtualRegister)])
        trace.active.loop(edge, core.index, reads)


def fori_loop(
    lower: VirtualRegister | int,
    upper: VirtualRegister | int,
    body_fun: Callable[[VirtualRegister], object],
    step: int = 1,
) -> None:
    """body_fun(i) for i = lower, lower + step, ... below upper; i is a read-only register."""
    step = _check_step("nl.fori_loop", step)
    start, stop = integer("nl.fori_loop: lower", lower), integer("nl.fori_loop: upper", upper)
    _mark("begin", lower, upper)
    for i in range(start, stop, step):
        _mark("iteration")
        if body_fun(VirtualRegister(i, frozen=True)) is not None:
            raise NkiValidationError("nl.fori_loop: the body returned a value; it must return None")
    _mark("end")


def while_loop(
    init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]
) -> None:
    """While the register is not 0: register = body_fun(register)."""
    register = init
    _mark("begin", init)
    while _condition(register):
        _mark("iteration")
        register = body_fun(VirtualRegister(register.state))
    _mark("end")


def _condition(register: Any) -> bool:
    if not isinstance(register, VirtualRegister):
        raise NkiValidationError(
            f"nl.while_loop: the condition is {type(register).__name__}; allowed: a register "
            "(the body returns the next condition)"
        )
    return register.value != 0


def dynamic_range(
    start: VirtualRegister | int, stop: VirtualRegister | int | None = None, step: int = 1
) -> Iterator[VirtualRegister]:
    """Device loop with run-time bounds, deprecated in 0.6.0 in favour of fori_loop."""
    violation("deprecated", "nl.dynamic_range is deprecated since 0.6.0; use nl.fori_loop")
    step = _check_step("nl.dynamic_range", step)
    if stop is None:
        start, stop = 0, start
    first, last = integer("nl.dynamic_range: start", start), integer("nl.dynamic_range: stop", stop)
    _mark("begin", start, stop)
    for i in range(first, last, step):
        _mark("iteration")
        yield VirtualRegister(i, frozen=True)
    _mark("end")


def _static(name: str, start: Any, stop: Any, step: Any) -> range:
    violation("deprecated", f"nl.{name} is deprecated; use range")
    for label, x in (("start", start), ("stop", stop), ("step", step)):
        if isinstance(x, VirtualRegister):
            raise NkiValidationError(
                f"nl.{name}: {label} is a register; use nl.fori_loop for run-time bounds"
            )
    return range(start) if stop is None else range(start, stop, step)


def static_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """Same as range; deprecated."""
    return _static("static_range", start, stop, step)


def affine_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """Same as range; deprecated."""
    return _static("affine_range", start, stop, step)


def sequential_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """Same as range; deprecated."""
    return _static("sequential_range", start, stop, step)


@contextmanager
def no_reorder() -> Iterator[None]:
    """Region that executes in program order; dynamic loops are not allowed inside."""
    core = current()
    before = core.in_no_reorder
    core.in_no_reorder = True
    try:
        yield
    finally:
        core.in_no_reorder = before
