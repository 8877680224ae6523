"""Activation functions of the Scalar Engine, with the input ranges in which they are valid.

The device evaluates piecewise polynomials; here the exact function is rounded to float32.
Ranges: "Supported Activation Functions" of the NKI ISA common fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import pi, sqrt
from typing import Final

import numpy as np

from .dtypes import Array
from .errors import NkiValidationError
from .ops import NAMES, shown

Function = Callable[..., Array]


@dataclass(frozen=True, slots=True, eq=False)
class Activation:
    """`apply(x, out=None)` on float32; valid for low <= x <= high (of |x| when symmetric)."""

    name: str
    apply: Function
    low: float = -float("inf")
    high: float = float("inf")
    symmetric: bool = False

    @property
    def limited(self) -> bool:
        """Whether the valid range is narrower than all floats."""
        return self.high != float("inf")


def _copy(x: Array, out: Array | None = None) -> Array:
    if out is None:
        return x
    out[...] = x
    return out


def _wide(function: Callable[[Array], Array]) -> Function:
    """Evaluate in float64 and round once."""

    def apply(x: Array, out: Array | None = None) -> Array:
        result = function(x.astype(np.float64))
        if out is None:
            return result.astype(np.float32)
        out[...] = result
        return out

    return apply


def _sigmoid(x: Array) -> Array:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), 1 - 1 / (1 + np.exp(-np.abs(x))))


def _erf(x: Array) -> Array:
    """Abramowitz-Stegun series and continued fraction, accurate to 1e-15 relative to 1."""
    a = np.abs(x)
    small = np.minimum(a, 3.0)
    term = small.copy()
    series = small.copy()
    for n in range(1, 80):
        term = term * (-small * small) / n
        series = series + term / (2 * n + 1)
    series = series * (2 / sqrt(pi))
    large = np.clip(a, 2.0, 27.0)
    fraction = large
    for n in range(60, 0, -1):
        fraction = large + (n / 2) / fraction
    tail = 1 - np.exp(-large * large) / (fraction * sqrt(pi))
    result: Array = np.copysign(np.where(a < 2.5, series, tail), x)
    return np.where(np.isnan(x), x, result)


def _normal_cdf(x: Array) -> Array:
    return 0.5 * (1 + _erf(x / sqrt(2)))


def _gelu(x: Array) -> Array:
    return np.where(np.isinf(x), np.maximum(x, 0), x * _normal_cdf(x))


def _gelu_dx(x: Array) -> Array:
    density = np.exp(-x * x / 2) / sqrt(2 * pi)
    return _normal_cdf(x) + np.where(np.isinf(x), 0, x * density)


def _gelu_tanh(x: Array) -> Array:
    inner = sqrt(2 / pi) * (x + 0.044715 * x**3)
    return np.where(np.isinf(x), np.maximum(x, 0), 0.5 * x * (1 + np.tanh(inner)))


def _gelu_sigmoid(x: Array) -> Array:
    return _times_sigmoid(x, 1.702)


def _times_sigmoid(x: Array, slope: float) -> Array:
    return np.where(np.isinf(x), np.maximum(x, 0), x * _sigmoid(slope * x))


def _gelu_sigmoid_dx(x: Array) -> Array:
    return _times_sigmoid_dx(x, 1.702)


def _times_sigmoid_dx(x: Array, slope: float) -> Array:
    s = _sigmoid(slope * x)
    return np.where(np.isinf(x), s, s + slope * x * s * (1 - s))


def _softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _mish(x: Array) -> Array:
    return np.where(np.isinf(x), np.maximum(x, 0), x * np.tanh(_softplus(x)))


def _erf_dx(x: Array) -> Array:
    result: Array = 2 / sqrt(pi) * np.exp(-x * x)
    return result


def _sin(x: Array) -> Array:
    """Exact inside [-pi, pi]; outside, the cubic that the last segment extrapolates: the Taylor
    polynomial of sin at +-pi, which gives the documented sin(9.0) = 27.65.
    """
    end = np.copysign(pi, x)
    d = x - end
    return np.where(np.abs(x) <= pi, np.sin(x), -d + d**3 / 6)


def _sqrt(x: Array, out: Array | None = None) -> Array:
    return np.sqrt(x, out=out)


def _rsqrt(x: Array, out: Array | None = None) -> Array:
    return np.divide(np.float32(1), np.sqrt(x, out=out), out=out)


def _reciprocal(x: Array, out: Array | None = None) -> Array:
    return np.divide(np.float32(1), x, out=out)


def _relu(x: Array, out: Array | None = None) -> Array:
    return np.maximum(x, np.float32(0), out=out)


_TABLE: Final = (
    Activation("copy", _copy),
    Activation("square", np.square),
    Activation("sigmoid", _wide(_sigmoid)),
    Activation("relu", _relu),
    Activation("gelu", _wide(_gelu)),
    Activation("gelu_dx", _wide(_gelu_dx)),
    Activation("gelu_apprx_tanh", _wide(_gelu_tanh)),
    Activation("gelu_apprx_sigmoid", _wide(_gelu_sigmoid)),
    Activation("gelu_apprx_sigmoid_dx", _wide(_gelu_sigmoid_dx)),
    Activation("silu", _wide(lambda x: _times_sigmoid(x, 1.0))),
    Activation("silu_dx", _wide(lambda x: _times_sigmoid_dx(x, 1.0))),
    Activation("tanh", np.tanh),
    Activation("softplus", _wide(_softplus)),
    Activation("mish", _wide(_mish)),
    Activation("erf", _wide(_erf)),
    Activation("erf_dx", _wide(_erf_dx)),
    Activation("exp", np.exp),
    Activation("log", np.log, 2.0**-64, 2.0**64),
    Activation("sin", _wide(_sin), -pi, pi),
    Activation("arctan", np.arctan, -pi / 2, pi / 2),
    Activation("sqrt", _sqrt, 2.0**-116, 2.0**118),
    Activation("rsqrt", _rsqrt, 2.0**-87, 2.0**97),
    Activation("reciprocal", _reciprocal, 2.0**-42, 2.0**42, symmetric=True),
    Activation("sign", np.sign),
    Activation("abs", np.abs),
)
ACTIVATIONS: Final[dict[str, Activation]] = {a.name: a for a in _TABLE}


def activation_of(instruction: str, op: object) -> Activation:
    """The activation function a kernel passed; NkiValidationError when it is none."""
    name = NAMES.get(op)
    found = ACTIVATIONS.get(name) if name is not None else None
    if found is None:
        raise NkiValidationError(
            f"{instruction}: op is {shown(op)}; allowed are nl. {', '.join(sorted(ACTIVATIONS))}"
        )
    return found
