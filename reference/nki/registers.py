"""Virtual registers: 32-bit scalars of an engine's sequencer, whose values exist on the device."""

from __future__ import annotations

import ast
import linecache
import sys
from functools import lru_cache
from typing import Any, Final, NoReturn, SupportsIndex

from .core import current
from .errors import NkiValidationError, UninitializedReadError, at_kernel_line
from .nkiobject import NKIObject
from .records import Access
from .serial import new_serial
from .strict import level, violation
from .trips import Trips

_INSTEAD: Final = (
    "a register has no value while the kernel is compiled; it may bound nl.fori_loop, be the "
    "condition of nl.while_loop, address tensors (t[..., register], .select, nl.ds, "
    ".ap(scalar_offset=...)), be the offset of nisa.iota and nisa.affine_select, and go through "
    "nisa.register_move and register_store"
)


class VirtualRegister(NKIObject):
    """A 32-bit register; `state` None means not initialised, `frozen` a loop's induction value."""

    __slots__ = ("_access", "born", "frozen", "state")

    def __init__(self, state: int | None = None, frozen: bool = False) -> None:
        self.state = None if state is None else _wrap(state)
        self.frozen = frozen
        self.born = new_serial()
        self._access: Access | None = None

    @property
    def access(self) -> Access:
        """The register as the trace records it."""
        if self._access is None:
            self._access = Access(self.born, "register", "int32", 4, 0, 0, (1,), (4,))
        return self._access

    @property
    def value(self) -> int:
        """What the device would read now. UninitializedReadError before anything set it."""
        if self.state is None:
            raise UninitializedReadError(
                "a register is read before register_move or register_load set it"
            )
        return self.state

    def set(self, value: int, instruction: str) -> None:
        """Assign.

        NkiValidationError for the induction register of a loop; rule loop_state for a register
        that a nested loop carries from trip to trip (it does not compile, known issue of 0.4.0).
        """
        if self.frozen:
            raise NkiValidationError(
                f"{instruction}: dst is the induction register of a loop, which is read only; "
                "copy it with register_alloc and register_move first"
            )
        trips = current().trips
        if trips is not None and trips.carries(self, self.born):
            violation(
                "loop_state",
                f"{instruction}: a register from outside of a nested dynamic loop ({trips.loop}) "
                "is written in it, which does not compile; keep the value in a [1, 1] tile in "
                "SBUF, or unroll the outer loop with range",
            )
        self.state = _wrap(value)

    def __repr__(self) -> str:
        return f"VirtualRegister({self.state})"

    def __index__(self) -> NoReturn:
        raise NkiValidationError(
            f"a register is used where Python needs an integer (int(), float(), range(), a slice "
            f"bound, a shape, a list index, an immediate); {_INSTEAD}{at_kernel_line()}"
        )

    __int__ = __float__ = __index__

    def __bool__(self) -> bool:
        """A bare `while register:` runs on the device; every other condition is an error."""
        frame = sys._getframe(1)
        if frame.f_lineno in _register_loops(frame.f_code.co_filename):
            violation(
                "deprecated", "while on a register is deprecated since 0.6.0; use nl.while_loop"
            )
            _follow_while(self, self.value != 0)
            return self.value != 0
        raise NkiValidationError(
            f"a register is used as a Python condition; {_INSTEAD}{at_kernel_line()}"
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (SupportsIndex, float)):
            self._no_operator()
        return self is other

    __hash__ = NKIObject.__hash__

    def _no_operator(self, *_: Any) -> NoReturn:
        raise NkiValidationError(
            f"registers have no Python operators (arithmetic, comparisons); compute in an SBUF "
            f"tile and nisa.register_load the result, or put constants in .ap(offset=...); "
            f"{_INSTEAD}{at_kernel_line()}"
        )

    __lt__ = __le__ = __gt__ = __ge__ = _no_operator
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_operator
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mod__ = __rmod__ = _no_operator
    __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = __pow__ = __neg__ = __abs__ = (
        _no_operator
    )


def integer(label: str, x: Any) -> int:
    """The value of an integer or register operand; NkiValidationError for anything else."""
    if isinstance(x, VirtualRegister):
        return x.value
    if not isinstance(x, SupportsIndex):
        raise NkiValidationError(
            f"{label} is {type(x).__name__}; allowed: an int or a register (load a tensor element "
            "with nisa.register_load)"
        )
    return x.__index__()


def _follow_while(register: VirtualRegister, again: bool) -> None:
    """A bare `while register:` is about to run its body, or ends."""
    core = current()
    trips = core.trips
    if trips is None or trips.condition is not register:
        if not again or level("loop_state") == "off":
            return
        trips = core.trips = Trips("while register", trips, register)
    if again:
        trips.begin_trip()
    else:
        core.trips = trips.outer
        trips.end()


@lru_cache(maxsize=256)
def _register_loops(file: str) -> frozenset[int]:
    """The lines on which a `while` tests one value and nothing else."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return frozenset()
    bare = ast.Name | ast.Attribute | ast.Subscript
    loops = (n for n in ast.walk(tree) if isinstance(n, ast.While) and isinstance(n.test, bare))
    return frozenset(loop.test.lineno for loop in loops)


def _wrap(value: int) -> int:
    """The low 32 bits as a signed integer."""
    return (int(value) + 2**31) % 2**32 - 2**31
