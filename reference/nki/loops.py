"""Loops of NKI: dynamic device loops run eagerly, the static ranges are Python's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, SupportsIndex

from . import trace
from .core import current
from .errors import NkiValidationError, RunTimeValueError
from .isa.scalars import NkiScalar
from .records import Access, LoopEdge
from .registers import RunTimeValue, VirtualRegister, integer
from .rules.regions import enter_region
from .strict import level, violation
from .trips import Trips


def _check_step(name: str, step: Any) -> int:
    if isinstance(step, RunTimeValue) or not isinstance(step, SupportsIndex):
        raise RunTimeValueError(f"{name}: step must be a compile-time integer, got {step!r}")
    if step.__index__() < 1:
        raise NkiValidationError(f"{name}: step {step!r}; allowed: >= 1")
    return step.__index__()


class DynamicLoop:
    """A dynamic loop that runs: its edges are recorded, its trips compared.

    Run-time values among the bounds are read.
    """

    def __init__(self, name: str, *bounds: object) -> None:
        self.core = current()
        if self.core.in_no_reorder:
            raise NkiValidationError("a dynamic loop inside nl.no_reorder() is not supported")
        self.region = enter_region(self.core, name)
        self._record("begin", tuple([b.access for b in bounds if isinstance(b, RunTimeValue)]))
        self.outer = self.core.trips
        self.trips = None if level("loop_state") == "off" else Trips(name, self.outer)

    def next_trip(self, body: Callable[[Any], object]) -> None:
        """The body is about to run."""
        self._record("iteration")
        self.region.trips += 1
        if self.trips is not None:
            self.trips.begin_trip(body)

    def _record(self, edge: LoopEdge, reads: tuple[Access, ...] = ()) -> None:
        if trace.active is not None:
            trace.active.loop(edge, self.core.index, reads)

    def __enter__(self) -> DynamicLoop:
        self.core.trips = self.trips
        self.core.region = self.region
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.core.trips = self.outer
        self.core.region = self.region.outer
        if kind is None:
            if self.trips is not None:
                self.trips.end()
            self._record("end")


Bound = int | VirtualRegister | NkiScalar


def fori_loop(lower: Bound, upper: Bound, body_fun: Callable[[Any], object], step: int = 1) -> None:
    """body_fun(i) for i = lower, lower + step, ... below upper.

    Bounds are integers, registers or int32 scalars. i is a read-only register when a bound is a
    register, else an NkiScalar.
    """
    step = _check_step("nl.fori_loop", step)
    start, stop = integer("nl.fori_loop: lower", lower), integer("nl.fori_loop: upper", upper)
    registers = isinstance(lower, VirtualRegister) or isinstance(upper, VirtualRegister)
    with DynamicLoop("nl.fori_loop", lower, upper) as loop:
        for i in range(start, stop, step):
            loop.next_trip(body_fun)
            counter = VirtualRegister(i, frozen=True) if registers else NkiScalar(i)
            if body_fun(counter) is not None:
                raise NkiValidationError(
                    "nl.fori_loop: the body returned a value; it must return None"
                )


def while_loop(
    init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]
) -> None:
    """While the register is not 0: register = body_fun(register)."""
    register = init
    with DynamicLoop("nl.while_loop", init) as loop:
        while _condition(register):
            loop.next_trip(body_fun)
            register = body_fun(VirtualRegister(register.state))


def _condition(register: Any) -> bool:
    if not isinstance(register, VirtualRegister):
        raise RunTimeValueError(
            f"nl.while_loop: the condition is {type(register).__name__}; allowed: a register "
            "(the body returns the next condition)"
        )
    return register.value != 0


def _static(name: str, start: Any, stop: Any, step: Any) -> range:
    violation("deprecated", f"nl.{name} is deprecated; use range")
    for label, x in (("start", start), ("stop", stop), ("step", step)):
        if isinstance(x, RunTimeValue):
            raise RunTimeValueError(
                f"nl.{name}: {label} is {x.what}; use nl.fori_loop for run-time bounds"
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
