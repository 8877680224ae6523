"""Unary functions of `nki.language`: activation and operator tokens, and functions on tiles.

Each returns a new SBUF tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import dtype_name
from ..errors import NkiValidationError
from ..isa.activation import activation
from ..isa.copies import tensor_copy
from ..isa.execute import finish, fp32, put
from ..isa.tensor_scalar import tensor_scalar
from ..ops import token
from ..regions import PSUM
from ..tensor import NkiTensor
from .creation import allocate


def _result(x: NkiTensor, dtype: Any) -> NkiTensor:
    """A new SBUF tile of x's shape."""
    return allocate(x.shape, x.dtype if dtype is None else dtype_name(dtype))


def _activate(op: Any, x: NkiTensor, dtype: Any) -> NkiTensor:
    made = _result(x, dtype)
    activation(made, op, x)
    return made


@token
def abs(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """|x|."""
    return _activate(abs, x, dtype)


@token
def square(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """X * x."""
    return _activate(square, x, dtype)


@token
def exp(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """E ** x."""
    return _activate(exp, x, dtype)


@token
def log(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Natural logarithm."""
    return _activate(log, x, dtype)


@token
def sqrt(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Square root."""
    return _activate(sqrt, x, dtype)


@token
def rsqrt(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """1 / sqrt(x) of a tile in SBUF."""
    if x.buffer is PSUM:
        raise NkiValidationError(
            f"nl.rsqrt: x {x.name!r} is in psum, which is not supported since 0.5.0; use "
            "nisa.activation(op=nl.rsqrt)"
        )
    return _activate(rsqrt, x, dtype)


@token
def tanh(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Hyperbolic tangent."""
    return _activate(tanh, x, dtype)


@token
def sigmoid(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """1 / (1 + e ** -x)."""
    return _activate(sigmoid, x, dtype)


@token
def relu(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """max(x, 0)."""
    return _activate(relu, x, dtype)


@token
def gelu(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """X times the normal distribution function."""
    return _activate(gelu, x, dtype)


@token
def gelu_apprx_sigmoid(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """X * sigmoid(1.702 x)."""
    return _activate(gelu_apprx_sigmoid, x, dtype)


@token
def gelu_apprx_tanh(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Gelu by its tanh approximation."""
    return _activate(gelu_apprx_tanh, x, dtype)


@token
def gelu_dx(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Derivative of gelu."""
    return _activate(gelu_dx, x, dtype)


@token
def gelu_apprx_sigmoid_dx(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Derivative of gelu_apprx_sigmoid."""
    return _activate(gelu_apprx_sigmoid_dx, x, dtype)


@token
def silu(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """X * sigmoid(x)."""
    return _activate(silu, x, dtype)


@token
def silu_dx(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Derivative of silu."""
    return _activate(silu_dx, x, dtype)


@token
def softplus(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """log(1 + e ** x)."""
    return _activate(softplus, x, dtype)


@token
def mish(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """X * tanh(softplus(x))."""
    return _activate(mish, x, dtype)


@token
def erf(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Error function."""
    return _activate(erf, x, dtype)


@token
def erf_dx(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Derivative of the error function."""
    return _activate(erf_dx, x, dtype)


@token
def reciprocal(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """1 / x."""
    return _activate(reciprocal, x, dtype)


@token
def arctan(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Arc tangent."""
    return _activate(arctan, x, dtype)


@token
def sign(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """-1, 0 or 1."""
    return _activate(sign, x, dtype)


@token
def copy(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A copy of x in a new SBUF tile; bit exact for the same dtype."""
    made = _result(x, dtype)
    tensor_copy(made, x)
    return made


@token
def invert(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Bitwise not."""
    made = _result(x, dtype)
    tensor_scalar(made, x, invert, None)
    return made


def _computed(name: str, function: Any, x: NkiTensor, dtype: Any) -> NkiTensor:
    """A function that the compiler lowers to several instructions, counted as one."""
    made = _result(x, dtype)
    put(made, function(fp32(x, f"nl.{name}", "x")), f"nl.{name}")
    finish("scalar", name, (made,), (x,))
    return made


@token
def sin(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Sine with range reduction (nisa.activation(op=nl.sin) has none)."""
    return _computed("sin", np.sin, x, dtype)


def cos(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Cosine."""
    return _computed("cos", np.cos, x, dtype)


def tan(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Tangent."""
    return _computed("tan", np.tan, x, dtype)


def ceil(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Smallest integer not below x."""
    return _computed("ceil", np.ceil, x, dtype)


def floor(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Largest integer not above x."""
    return _computed("floor", np.floor, x, dtype)


def trunc(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """X without its fraction."""
    return _computed("trunc", np.trunc, x, dtype)


def negative(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """-x."""
    return _computed("negative", np.negative, x, dtype)


def logical_not(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """1.0 where x is 0, else 0.0."""
    return _computed("logical_not", lambda v: (v == 0).astype(np.float32), x, dtype)
