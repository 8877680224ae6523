"""Elementwise functions of `nki.language`: operator tokens for nki.isa, and functions on tiles.

Each returns a new SBUF tile. Binary functions take tile-tile or tile-scalar arguments.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ..dtypes import dtype_name
from ..errors import NkiValidationError
from ..isa.tensor_ops import tensor_tensor
from ..isa.tensor_scalar import tensor_scalar
from ..ops import op_of, token
from ..tensor import NkiTensor
from .creation import allocate


def _result(x: NkiTensor, dtype: Any) -> NkiTensor:
    """A new SBUF tile of x's shape."""
    return allocate(x.shape, x.dtype if dtype is None else dtype_name(dtype))


def _binary(op: Any, x: Any, y: Any, dtype: Any) -> NkiTensor:
    me = f"nl.{op.__name__}"
    op_of(me, "op", op)
    if isinstance(x, NkiTensor) and isinstance(y, NkiTensor):
        if x.shape != y.shape and not _is_column(y, x) and not _is_column(x, y):
            raise NkiValidationError(
                f"{me}: tiles of shapes {x.shape} and {y.shape}; they must be equal, or one is "
                "[P, 1]"
            )
        if x.shape == y.shape:
            made = _result(x, dtype)
            tensor_tensor(made, x, y, op)
        elif _is_column(y, x):
            made = _result(x, dtype)
            tensor_scalar(made, x, op, y)
        else:
            made = _result(y, dtype)
            tensor_scalar(made, y, op, x, reverse0=True)
        return made
    if isinstance(x, NkiTensor):
        made = _result(x, dtype)
        tensor_scalar(made, x, op, y)
        return made
    if isinstance(y, NkiTensor):
        made = _result(y, dtype)
        tensor_scalar(made, y, op, x, reverse0=True)
        return made
    raise NkiValidationError(f"{me}: at least one argument must be a tile")


def _is_column(narrow: NkiTensor, wide: NkiTensor) -> bool:
    return narrow.shape == (wide.shape[0], 1) and narrow.dtype == "float32"


@token
def add(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Elementwise x + y."""
    return _binary(add, x, y, dtype)


@token
def subtract(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Elementwise x - y."""
    return _binary(subtract, x, y, dtype)


@token
def multiply(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Elementwise x * y."""
    return _binary(multiply, x, y, dtype)


@token
def maximum(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """The larger of x and y."""
    return _binary(maximum, x, y, dtype)


@token
def minimum(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """The smaller of x and y."""
    return _binary(minimum, x, y, dtype)


@token
def power(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Elementwise x ** y of two tiles; a scalar exponent is not supported (0.3.0)."""
    if not isinstance(y, NkiTensor):
        raise NkiValidationError(
            f"nl.power: exponent {y!r} is a scalar, which is not supported; pass a tile (nl.full), "
            "or use nl.square, nl.sqrt, nl.rsqrt or nl.reciprocal"
        )
    return _binary(power, x, y, dtype)


@token
def equal(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Elementwise x == y as 1.0 or 0.0."""
    return _binary(equal, x, y, dtype)


@token
def not_equal(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Elementwise x != y as 1.0 or 0.0."""
    return _binary(not_equal, x, y, dtype)


@token
def less(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Elementwise x < y as 1.0 or 0.0."""
    return _binary(less, x, y, dtype)


@token
def less_equal(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Elementwise x <= y as 1.0 or 0.0."""
    return _binary(less_equal, x, y, dtype)


@token
def greater(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Elementwise x > y as 1.0 or 0.0."""
    return _binary(greater, x, y, dtype)


@token
def greater_equal(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Elementwise x >= y as 1.0 or 0.0."""
    return _binary(greater_equal, x, y, dtype)


@token
def bitwise_and(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Elementwise x & y."""
    return _binary(bitwise_and, x, y, dtype)


@token
def bitwise_or(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Elementwise x | y."""
    return _binary(bitwise_or, x, y, dtype)


@token
def bitwise_xor(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Elementwise x ^ y."""
    return _binary(bitwise_xor, x, y, dtype)


@token
def left_shift(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Elementwise x << y."""
    return _binary(left_shift, x, y, dtype)


@token
def right_shift(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Elementwise x >> y, zeros come in from the left."""
    return _binary(right_shift, x, y, dtype)


@token
def logical_and(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """1.0 where both are nonzero."""
    return _binary(logical_and, x, y, dtype)


@token
def logical_or(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """1.0 where one is nonzero."""
    return _binary(logical_or, x, y, dtype)


@token
def logical_xor(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """1.0 where exactly one is nonzero."""
    return _binary(logical_xor, x, y, dtype)


@token
def abs_max(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Max(|x|, |y|); trn3 only."""
    return _binary(abs_max, x, y, dtype)


@token
def abs_min(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Min(|x|, |y|); trn3 only."""
    return _binary(abs_min, x, y, dtype)


def _unsupported(name: str, instead: str) -> NoReturn:
    raise NkiValidationError(f"nl.{name} does not exist on the device; {instead}")


def divide(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Division does not exist on the device: NkiValidationError."""
    _unsupported("divide", "multiply by nl.reciprocal(y) or nisa.reciprocal")


def mod(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Modulus does not exist on the device: NkiValidationError."""
    _unsupported("mod", "for powers of two use nl.bitwise_and on integers")


def fmod(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Remainder does not exist on the device: NkiValidationError."""
    _unsupported("fmod", "for powers of two use nl.bitwise_and on integers")
