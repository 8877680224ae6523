"""NkiScalar: int32 and int64 integers of the device, with arithmetic (NKI 0.7)."""

from __future__ import annotations

from typing import Any, Final, NoReturn, SupportsIndex

import numpy as np

from ..errors import NkiValidationError, RunTimeValueError, at_kernel_line
from ..registers import RunTimeValue, wrap
from ..tensor import NkiTensor
from .execute import put, raw
from .register_moves import check_element, record

_BITS: Final = {"int32": 32, "int64": 64}


class NkiScalar(RunTimeValue):
    """A device integer of fixed width, made by `scalar_load` and by arithmetic on others.

    It has +, - (also unary) and * with Python integers and scalars of its dtype, and wraps in its
    width. int32 comparisons are traced but nothing takes their result. Only int32 bounds loops and
    addresses tensors on the chip; int64 addresses HBM.
    """

    __slots__ = ("dtype", "is_comparison")

    def __init__(self, state: int, dtype: str | None = None, is_comparison: bool = False) -> None:
        self.dtype = dtype or "int32"
        super().__init__(wrap(state, _BITS[self.dtype]))
        self.is_comparison = is_comparison

    @property
    def what(self) -> str:  # type: ignore[override]  # depends on the value here
        """The value in words."""
        return (
            f"the result of comparing {self.dtype} scalars"
            if self.is_comparison
            else (f"an {self.dtype} scalar")
        )

    def __repr__(self) -> str:
        return f"NkiScalar({self.state}, {self.dtype})"

    def check_address(self, label: str, *, on_chip: bool) -> None:
        """RunTimeValueError for a comparison, and for an int64 loop bound or on-chip address."""
        if self.is_comparison or (on_chip and self.dtype != "int32"):
            raise RunTimeValueError(
                f"{label} is {self.what}; allowed: an int32 scalar"
                + ("" if on_chip else " or, in HBM, an int64 one")
            )

    def _other(self, symbol: str, other: Any) -> int:
        """The value of the other operand; RunTimeValueError for what has no place here."""
        if self.is_comparison or (isinstance(other, NkiScalar) and other.is_comparison):
            raise RunTimeValueError(
                f"{symbol} on the result of a comparison, which no instruction takes"
                f"{at_kernel_line()}"
            )
        if isinstance(other, NkiScalar):
            if other.dtype != self.dtype:
                raise RunTimeValueError(
                    f"{self.dtype} {symbol} {other.dtype}: the scalars must have the same dtype"
                    f"{at_kernel_line()}"
                )
            return other.value
        if isinstance(other, RunTimeValue) or not isinstance(other, SupportsIndex):
            raise RunTimeValueError(
                f"{self.what} {symbol} {type(other).__name__}: allowed are Python integers and "
                f"scalars of the same dtype{at_kernel_line()}"
            )
        number = other.__index__()
        if wrap(number, _BITS[self.dtype]) != number:
            raise RunTimeValueError(
                f"{self.what} {symbol} {number}: the integer does not fit {self.dtype}"
                f"{at_kernel_line()}"
            )
        return number

    def _made(self, opcode: str, value: int, other: Any = None) -> NkiScalar:
        made = NkiScalar(value, self.dtype)
        record(opcode, (made,), (self, other))
        return made

    def __add__(self, other: Any) -> NkiScalar:
        return self._made("scalar_add", self.value + self._other("+", other), other)

    def __radd__(self, other: Any) -> NkiScalar:
        return self._made("scalar_add", self._other("+", other) + self.value, other)

    def __sub__(self, other: Any) -> NkiScalar:
        return self._made("scalar_subtract", self.value - self._other("-", other), other)

    def __rsub__(self, other: Any) -> NkiScalar:
        return self._made("scalar_subtract", self._other("-", other) - self.value, other)

    def __mul__(self, other: Any) -> NkiScalar:
        return self._made("scalar_multiply", self.value * self._other("*", other), other)

    def __rmul__(self, other: Any) -> NkiScalar:
        return self._made("scalar_multiply", self._other("*", other) * self.value, other)

    def __pos__(self) -> NkiScalar:
        self._other("+", self)
        return self

    def __neg__(self) -> NkiScalar:
        return self._made("scalar_subtract", -self._other("-", self))

    def _compare(self, other: Any, symbol: str) -> NkiScalar:
        self._other(symbol, other)
        if self.dtype != "int32":
            raise RunTimeValueError(
                f"{symbol} on {self.what}: int64 has +, - and * only{at_kernel_line()}"
            )
        return NkiScalar(0, self.dtype, is_comparison=True)

    def __lt__(self, other: Any) -> NkiScalar:
        return self._compare(other, "<")

    def __le__(self, other: Any) -> NkiScalar:
        return self._compare(other, "<=")

    def __gt__(self, other: Any) -> NkiScalar:
        return self._compare(other, ">")

    def __ge__(self, other: Any) -> NkiScalar:
        return self._compare(other, ">=")

    def __eq__(self, other: object) -> Any:
        """A comparison of numbers; whether it is the same object for anything else."""
        if isinstance(other, (NkiScalar, SupportsIndex)):
            return self._compare(other, "==")
        return self is other

    def __ne__(self, other: object) -> Any:
        if isinstance(other, (NkiScalar, SupportsIndex)):
            return self._compare(other, "!=")
        return self is not other

    __hash__ = RunTimeValue.__hash__

    def _no_operator(self, *_: Any) -> NoReturn:
        raise RunTimeValueError(
            f"{self.what} has the operators +, - and * only; compute the rest in a [1, 1] tile and "
            f"load it with nisa.scalar_load{at_kernel_line()}"
        )

    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mod__ = __rmod__ = _no_operator
    __divmod__ = __pow__ = __rpow__ = __lshift__ = __rshift__ = __and__ = __or__ = __xor__ = (
        _no_operator
    )
    __rlshift__ = __rrshift__ = __rand__ = __ror__ = __rxor__ = __invert__ = __abs__ = _no_operator


def scalar_load(src: NkiTensor) -> NkiScalar:
    """The one element of src (int32 or int64, SBUF or HBM) as a scalar of its width."""
    me = "nisa.scalar_load"
    check_element(me, "src", src)
    _check_dtype(me, "src", src)
    made = NkiScalar(int(raw(src, me, "src").reshape(-1)[0]), src.dtype)
    record("scalar_load", (made,), (src,))
    return made


def scalar_store(dst: NkiTensor, value: NkiScalar) -> None:
    """The one element of dst = value, a scalar of dst's width."""
    me = "nisa.scalar_store"
    check_element(me, "dst", dst)
    _check_dtype(me, "dst", dst)
    given: Any = value
    if not isinstance(given, NkiScalar):
        raise RunTimeValueError(
            f"{me}: value is {type(given).__name__}; allowed: an NkiScalar (nisa.memset writes a "
            "Python integer, nisa.register_store a register)"
        )
    value.check_address(f"{me}: value", on_chip=False)
    if value.dtype != dst.dtype:
        raise RunTimeValueError(
            f"{me}: value is {value.what}, dst {dst.name!r} is {dst.dtype}; the widths must agree"
        )
    put(dst, np.full(dst.v.layout.shape, value.value, np.int64), me)
    record("scalar_store", (dst,), (value,))


def _check_dtype(me: str, operand: str, t: NkiTensor) -> None:
    if t.dtype not in _BITS:
        raise NkiValidationError(
            f"{me}: operand {operand} {t.name!r} has dtype {t.dtype}; allowed: int32, int64"
        )
