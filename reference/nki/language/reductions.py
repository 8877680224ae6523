"""Reductions and normalisations of `nki.language` along the free dimensions of a tile."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import Array, dtype_name
from ..errors import NkiValidationError
from ..isa.execute import finish, fp32, put
from ..isa.reduce import tensor_reduce
from ..ops import alias
from ..tensor import NkiTensor
from .binary import add, logical_and, maximum, minimum, multiply
from .creation import allocate


def _axes(me: str, x: NkiTensor, axis: Any) -> tuple[int, ...]:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    positive = tuple(sorted(a + x.ndim if a < 0 else a for a in axes))
    if not positive or positive[0] < 1 or positive != tuple(range(positive[0], x.ndim)):
        raise NkiValidationError(
            f"{me}: axis {axis} of a tile of shape {x.shape}; allowed: the last free dimensions"
        )
    return positive


def _shape(x: NkiTensor, axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    if keepdims:
        return tuple(1 if d in axes else n for d, n in enumerate(x.shape))
    kept = x.shape[: axes[0]]
    return kept if len(kept) > 1 else (*kept, 1)


def _reduce(op: Any, x: NkiTensor, axis: Any, dtype: Any, keepdims: bool) -> NkiTensor:
    axes = _axes(f"nl.{op.__name__}", x, axis)
    made = allocate(_shape(x, axes, keepdims), dtype or x.dtype)
    tensor_reduce(made, op, x, axes)
    return made


def _computed(
    name: str, function: Any, x: NkiTensor, axis: Any, dtype: Any, keepdims: bool
) -> NkiTensor:
    """A reduction that the compiler lowers to several instructions, counted as one."""
    axes = _axes(f"nl.{name}", x, axis)
    made = allocate(_shape(x, axes, keepdims), dtype or x.dtype)
    values: Array = function(fp32(x, f"nl.{name}", "x"), axes)
    put(made, values.reshape(made.shape), f"nl.{name}")
    finish("vector", name, (made,), (x,))
    return made


@alias("add")
def sum(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Sum along the last free dimensions."""
    return _reduce(add, x, axis, dtype, keepdims)


@alias("maximum")
def max(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Maximum along the last free dimensions."""
    return _reduce(maximum, x, axis, dtype, keepdims)


@alias("minimum")
def min(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Minimum along the last free dimensions."""
    return _reduce(minimum, x, axis, dtype, keepdims)


def prod(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Product along the last free dimensions."""
    return _reduce(multiply, x, axis, dtype, keepdims)


def all(x: NkiTensor, axis: Any, dtype: Any = None) -> NkiTensor:
    """1.0 where all elements along the last free dimensions are nonzero."""
    return _reduce(logical_and, x, axis, dtype, False)


def mean(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Mean along the last free dimensions, in float32."""
    return _computed("mean", lambda v, a: v.mean(axis=a), x, axis, dtype, keepdims)


def var(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Population variance along the last free dimensions; the dimensions are always kept."""
    return _computed("var", lambda v, a: v.var(axis=a), x, axis, dtype, True)


def softmax(x: NkiTensor, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """E ** (x - max) / sum along the last free dimensions."""
    axes = _axes("nl.softmax", x, axis)
    made = allocate(x.shape, dtype or x.dtype)
    values = fp32(x, "nl.softmax", "x")
    weights = np.exp(values - values.max(axis=axes, keepdims=True))
    put(made, weights / weights.sum(axis=axes, keepdims=True), "nl.softmax")
    finish("scalar", "softmax", (made,), (x,))
    return made


def rms_norm(
    x: NkiTensor,
    w: NkiTensor,
    axis: Any,
    n: int,
    epsilon: float = 1e-06,
    dtype: Any = None,
    compute_dtype: Any = None,
) -> NkiTensor:
    """X / sqrt(sum(x ** 2) / n + epsilon) * w."""
    axes = _axes("nl.rms_norm", x, axis)
    made = allocate(x.shape, dtype or x.dtype)
    inner = dtype_name(compute_dtype or "float32")
    if inner != "float32":
        raise NkiValidationError(f"nl.rms_norm: compute_dtype {inner}; allowed: float32")
    values = fp32(x, "nl.rms_norm", "x")
    mean_square = np.square(values).sum(axis=axes, keepdims=True) / np.float32(n)
    weight = fp32(w, "nl.rms_norm", "w")
    put(made, values / np.sqrt(mean_square + np.float32(epsilon)) * weight, "nl.rms_norm")
    finish("scalar", "rms_norm", (made,), (x, w))
    return made
