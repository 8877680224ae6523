"""Integers that only the device has: virtual registers, and what all run-time values share."""

from __future__ import annotations

from typing import Any, Final, NoReturn, SupportsIndex

from .core import current
from .errors import RunTimeValueError, UninitializedReadError, at_kernel_line, kernel_text
from .nkiobject import NKIObject
from .records import Access
from .serial import new_serial
from .strict import violation

_INSTEAD: Final = (
    "it has no value while the kernel is compiled; it may bound nl.fori_loop, address tensors "
    "(t[..., value], .select, nl.ds, .ap(scalar_offset=...)) and be the offset of nisa.iota and "
    "nisa.affine_select"
)


class RunTimeValue(NKIObject):
    """An integer that exists on the device only; Python must not need its value."""

    __slots__ = ("_access", "born", "state")

    what = "a run-time value"

    def __init__(self, state: int | None) -> None:
        self.state = state
        self.born = new_serial()
        self._access: Access | None = None

    @property
    def access(self) -> Access:
        """The value as the trace records it."""
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

    def check_address(self, label: str, *, on_chip: bool) -> None:
        """Whether the value may be a loop bound or an address; NkiValidationError if not."""

    def __index__(self) -> NoReturn:
        use = "where Python needs an integer (int(), float(), a slice bound, a shape, a list index)"
        instead = ""
        if "range(" in kernel_text():
            use, instead = "as a bound of range()", "write nl.fori_loop(lower, upper, body); "
        raise RunTimeValueError(f"{self.what} {use}; {instead}{_INSTEAD}{at_kernel_line()}")

    __int__ = __float__ = __index__

    def __bool__(self) -> NoReturn:
        instead = "nl.fori_loop(0, flag, body) runs its body when a 0/1 flag is set"
        if kernel_text().lstrip().startswith("while "):
            instead = "write nl.while_loop(init, body), whose body returns the next condition"
        raise RunTimeValueError(
            f"{self.what} as a Python condition; {instead}; {_INSTEAD}{at_kernel_line()}"
        )


class VirtualRegister(RunTimeValue):
    """A 32-bit register; `state` None means not initialised, `frozen` a loop's induction value."""

    __slots__ = ("frozen",)

    what = "a register"

    def __init__(self, state: int | None = None, frozen: bool = False) -> None:
        super().__init__(None if state is None else wrap(state, 32))
        self.frozen = frozen

    def set(self, value: int, instruction: str) -> None:
        """Assign.

        NkiValidationError for the induction register of a loop; rule loop_state for a register
        that a nested loop carries from trip to trip (it does not compile, known issue of 0.4.0).
        """
        if self.frozen:
            raise RunTimeValueError(
                f"{instruction}: dst is the induction register of a loop, which is read only; "
                "copy it with register_alloc and register_move first"
            )
        trips = current().trips
        if trips is not None and trips.carries(self.born):
            violation(
                "loop_state",
                f"{instruction}: a register from outside of a nested dynamic loop ({trips.loop}) "
                "is written in it, which does not compile; keep the value in a [1, 1] tile in "
                "SBUF, or unroll the outer loop with range",
            )
        self.state = wrap(value, 32)

    def __repr__(self) -> str:
        return f"VirtualRegister({self.state})"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (SupportsIndex, float)):
            self._no_operator()
        return self is other

    __hash__ = NKIObject.__hash__

    def _no_operator(self, *_: Any) -> NoReturn:
        raise RunTimeValueError(
            f"registers have no Python operators (arithmetic, comparisons); nisa.scalar_load gives "
            f"a value with +, - and *, .ap(offset=...) adds a constant; {_INSTEAD}"
            f"{at_kernel_line()}"
        )

    __lt__ = __le__ = __gt__ = __ge__ = _no_operator
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_operator
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mod__ = __rmod__ = _no_operator
    __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = __pow__ = __neg__ = __abs__ = (
        _no_operator
    )


def integer(label: str, x: object) -> int:
    """The value of an integer, register or int32 scalar operand; NkiValidationError otherwise."""
    if isinstance(x, RunTimeValue):
        x.check_address(label, on_chip=True)
        return x.value
    if not isinstance(x, SupportsIndex):
        raise RunTimeValueError(
            f"{label} is {type(x).__name__}; allowed: an int, a register or an int32 scalar (load "
            "a tensor element with nisa.scalar_load)"
        )
    return x.__index__()


def wrap(value: int, bits: int) -> int:
    """The low bits as a signed integer."""
    half = 1 << (bits - 1)
    return (value + half) % (2 * half) - half
