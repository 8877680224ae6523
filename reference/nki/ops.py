"""The table of ALU operators and activation functions.

One row per operator: its float32 meaning, class, whether it may reduce. Kernels pass the
`nki.language` function of the same name (`nl.add`); `op_of` finds its row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from .dtypes import Array
from .errors import NkiValidationError

Kind = Literal["arithmetic", "bitvec"]
Binary = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One ALU operator.

    `apply(x, y, out=None)` works elementwise on float32 (bitvec: integers); unary operators
    ignore y. `reduce(x, axis)` is None where the operator may not reduce; `identity` starts an
    accumulation.
    """

    name: str
    kind: Kind
    apply: Binary
    unary: bool = False
    reduce: Binary | None = None
    identity: float = 0.0
    trn3_only: bool = False
    exact_on_integers: bool = False
    """Whether the result for int32 inputs is exact integer arithmetic on GpSimd."""


def _compare(ufunc: Any) -> Binary:
    def apply(x: Array, y: Array, out: Array | None = None) -> Array:
        if out is None:
            out = np.empty(np.broadcast_shapes(np.shape(x), np.shape(y)), np.float32)
        result: Array = ufunc(x, y, out=out)
        return result

    return apply


def _unary(function: Callable[..., Any]) -> Binary:
    def apply(x: Array, y: object, out: Array | None = None) -> Array:
        result: Array = function(x, out=out)
        return result

    return apply


def _relu(x: Array, out: Array | None = None) -> Array:
    return np.maximum(x, np.float32(0), out=out)


def _rsqrt(x: Array, out: Array | None = None) -> Array:
    root = np.sqrt(x, out=out)
    return np.divide(np.float32(1), root, out=out)


def _reciprocal(x: Array, out: Array | None = None) -> Array:
    return np.divide(np.float32(1), x, out=out)


def _abs_extreme(ufunc: Any) -> Binary:
    def apply(x: Array, y: Array, out: Array | None = None) -> Array:
        result: Array = ufunc(np.abs(x), np.abs(y), out=out)
        return result

    return apply


def _logical_reduce(ufunc: Any) -> Binary:
    def reduce(x: Array, axis: Any) -> Array:
        return np.asarray(ufunc.reduce(x != 0, axis=axis)).astype(np.float32)

    return reduce


def _subtract_reduce(x: Array, axis: Any) -> Array:
    """0 - x0 - x1 - ...: the accumulator starts at the identity."""
    total: Array = np.add.reduce(x, axis=axis)
    return np.negative(total)


def _right_shift(x: Array, y: Any, out: Array | None = None) -> Array:
    """Logical shift: zeros come in from the left also for signed integers."""
    unsigned = x.view(x.dtype.str.replace("i", "u"))
    bits = np.asarray(y).astype(unsigned.dtype)
    return _shifted(np.right_shift, unsigned, bits).view(x.dtype)


def _left_shift(x: Array, y: Any, out: Array | None = None) -> Array:
    unsigned = x.view(x.dtype.str.replace("i", "u"))
    bits = np.asarray(y).astype(unsigned.dtype)
    return _shifted(np.left_shift, unsigned, bits).view(x.dtype)


def _shifted(ufunc: Any, x: Array, bits: Array) -> Array:
    """A shift by the width or more gives 0 (C and NumPy leave it undefined)."""
    width = x.dtype.itemsize * 8
    result: Array = np.where(bits < width, ufunc(x, np.minimum(bits, width - 1)), 0).astype(x.dtype)
    return result


_INF: Final = float("inf")
_TABLE: Final = (
    Op("add", "arithmetic", np.add, reduce=np.add.reduce, exact_on_integers=True),
    Op("subtract", "arithmetic", np.subtract, reduce=_subtract_reduce, exact_on_integers=True),
    Op(
        "multiply",
        "arithmetic",
        np.multiply,
        reduce=np.multiply.reduce,
        identity=1.0,
        exact_on_integers=True,
    ),
    Op("maximum", "arithmetic", np.maximum, reduce=np.maximum.reduce, identity=-_INF),
    Op("minimum", "arithmetic", np.minimum, reduce=np.minimum.reduce, identity=_INF),
    Op("equal", "arithmetic", _compare(np.equal)),
    Op("not_equal", "arithmetic", _compare(np.not_equal)),
    Op("less", "arithmetic", _compare(np.less)),
    Op("less_equal", "arithmetic", _compare(np.less_equal)),
    Op("greater", "arithmetic", _compare(np.greater)),
    Op("greater_equal", "arithmetic", _compare(np.greater_equal)),
    Op(
        "logical_and",
        "arithmetic",
        _compare(np.logical_and),
        reduce=_logical_reduce(np.logical_and),
        identity=1.0,
    ),
    Op(
        "logical_or",
        "arithmetic",
        _compare(np.logical_or),
        reduce=_logical_reduce(np.logical_or),
    ),
    Op(
        "logical_xor",
        "arithmetic",
        _compare(np.logical_xor),
        reduce=_logical_reduce(np.logical_xor),
    ),
    Op("power", "arithmetic", np.power),
    Op("abs_max", "arithmetic", _abs_extreme(np.maximum), trn3_only=True),
    Op("abs_min", "arithmetic", _abs_extreme(np.minimum), trn3_only=True),
    Op("abs", "arithmetic", _unary(np.abs), unary=True),
    Op("square", "arithmetic", _unary(np.square), unary=True),
    Op("relu", "arithmetic", _unary(_relu), unary=True),
    Op("rsqrt", "arithmetic", _unary(_rsqrt), unary=True),
    Op("reciprocal", "arithmetic", _unary(_reciprocal), unary=True),
    Op("bitwise_and", "bitvec", np.bitwise_and, reduce=np.bitwise_and.reduce, identity=-1.0),
    Op("bitwise_or", "bitvec", np.bitwise_or, reduce=np.bitwise_or.reduce),
    Op("bitwise_xor", "bitvec", np.bitwise_xor, reduce=np.bitwise_xor.reduce),
    Op("invert", "bitvec", _unary(np.invert), unary=True),
    Op("left_shift", "bitvec", _left_shift),
    Op("right_shift", "bitvec", _right_shift),
)
OPS: Final[dict[str, Op]] = {op.name: op for op in _TABLE}

NAMES: Final[dict[object, str]] = {}
"""Operator name of each `nki.language` function; filled by `token`."""


def token(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the function stands for the operator of its name."""
    NAMES[function] = function.__name__
    return function


def alias(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function stands for the operator `name` (nl.max for maximum)."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        NAMES[function] = name
        return function

    return register


_INSTEAD: Final = {
    "divide": "multiply by nisa.reciprocal",
    "mod": "subtract the multiple that a rounding cast gives",
    "fmod": "subtract the multiple that a rounding cast gives",
}


def shown(op: object) -> str:
    """How an error names what a kernel passed as an operator, and what to pass instead."""
    if isinstance(op, str):
        return f"the string {op!r}, pass nl.{op}"
    name = getattr(op, "__name__", "")
    if name in _INSTEAD:
        return f"nl.{name}, which the device does not have ({_INSTEAD[name]})"
    module = getattr(op, "__module__", None) or type(op).__module__
    if name and "nki" not in module:
        return f"{name!r} of {module}, pass an operator of nl"
    return repr(name or op)


def op_of(instruction: str, parameter: str, op: object) -> Op:
    """The ALU operator a kernel passed.

    NkiValidationError when it is no operator, or exists on trn3 only.
    """
    name = NAMES.get(op)
    found = OPS.get(name) if name is not None else None
    if found is None:
        allowed = sorted(name for name, entry in OPS.items() if not entry.trn3_only)
        raise NkiValidationError(
            f"{instruction}: {parameter} is {shown(op)}; allowed are nl. {', '.join(allowed)}"
        )
    if found.trn3_only:
        raise NkiValidationError(
            f"{instruction}: {parameter} nl.{name} exists on trn3 only, the target is trn2"
        )
    return found


def reduction_of(instruction: str, op: object) -> Op:
    """An operator that may reduce; NkiValidationError for one that may not."""
    found = op_of(instruction, "op", op)
    if found.reduce is None:
        allowed = sorted(o.name for o in _TABLE if o.reduce is not None)
        raise NkiValidationError(
            f"{instruction}: nl.{found.name} may not reduce; allowed: {', '.join(allowed)}"
        )
    return found
