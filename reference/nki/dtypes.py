"""NKI dtypes: plain strings, their NumPy storage, and the casts of the engines.

Arithmetic is float32; a result is cast once to the dtype of its destination. A float goes to an
integer by rounding to nearest even and saturating (NKI 0.6.0 release notes).
"""

from __future__ import annotations

import os
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .errors import NkiValidationError

Array = npt.NDArray[Any]

NUMPY: Final[dict[str, np.dtype[Any]]] = {
    "bool_": np.dtype(np.bool_),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "tfloat32": np.dtype(np.float32),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
}
TRN3_DTYPES: Final = ("float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4")
_ALIASES: Final = {"bool": "bool_", "float8e4": "float8_e4m3", "float8e5": "float8_e5m2"}

FLOATS: Final = frozenset(name for name in NUMPY if "float" in name)
INTEGERS: Final = frozenset(NUMPY) - FLOATS - {"int64"}
"""Integers that instructions compute with; int64 is of scalars and of tiles of one element."""
WIDE_INTEGERS: Final = frozenset({"int32", "uint32"})
DEVICE_ITEMSIZE: Final[dict[str, int]] = {name: dtype.itemsize for name, dtype in NUMPY.items()}
"""Bytes of an element on the device."""

PRECISE: Final = os.environ.get("NKI_PRECISE_FP", "1") != "0"
"""NKI_PRECISE_FP=0 stores low-precision floats as float32, without their rounding. Sizes and
limits stay those of the device; reinterpreting such bits and tiles that share an address do not
work then. Read once, at import.
"""
LOW_PRECISION: Final = frozenset(
    {"float16", "bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2"}
)
if not PRECISE:
    NUMPY.update(dict.fromkeys(LOW_PRECISION, np.dtype(np.float32)))
ITEMSIZE: Final[dict[str, int]] = {name: dtype.itemsize for name, dtype in NUMPY.items()}
"""Bytes of an element in the interpreter."""
FP8: Final = frozenset({"float8_e4m3", "float8_e4m3fn", "float8_e5m2"})


def dtype_name(dtype: object) -> str:
    """The NKI name of an NKI, NumPy, torch or JAX dtype.

    Raises NkiValidationError for a dtype that trn2 does not have.
    """
    if isinstance(dtype, str) and dtype in NUMPY:
        return dtype
    text = str(getattr(dtype, "name", None) or dtype).rsplit(".", 1)[-1]
    if text not in NUMPY and isinstance(dtype, type):
        text = dtype.__name__
    text = _ALIASES.get(text, text)
    if text in NUMPY:
        return text
    if text in TRN3_DTYPES:
        raise NkiValidationError(f"dtype {text} exists on trn3 only, the target is trn2")
    raise NkiValidationError(f"dtype {dtype!r} is not an NKI dtype; allowed: {sorted(NUMPY)}")


_LIMITS: Final = {
    name: (float(np.iinfo(NUMPY[name]).min), float(np.iinfo(NUMPY[name]).max))
    for name in INTEGERS - {"bool_"}
}


def round_to_integer(x: Array, dtype: str) -> Array:
    """float32 (or wider) values as integers of `dtype`: nearest even, saturating; NaN is 0."""
    low, high = _LIMITS[dtype]
    if x.dtype != np.float32 or dtype in WIDE_INTEGERS:
        # float32 cannot hold the limits of 32-bit integers
        x = x.astype(np.float64)
    wide = np.rint(x, out=np.empty(x.shape, x.dtype))
    np.clip(wide, low, high, out=wide)
    missing = np.isnan(wide)
    if missing.any():
        wide[missing] = 0
    return wide.astype(NUMPY[dtype])


def _round_to_tf32(x: Array) -> Array:
    """Round float32 to 10 mantissa bits, nearest even; infinities and NaN stay."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(
        0xFFFFE000
    )
    result: Array = np.where(np.isfinite(x), rounded.view(np.float32), x)
    return result


def cast(x: Array, dtype: str) -> Array:
    """Values of any dtype as the NumPy array that a tensor of `dtype` stores."""
    target = NUMPY[dtype]
    if x.dtype == target and dtype != "tfloat32":
        return x
    if dtype == "tfloat32":
        return _round_to_tf32(x)
    if dtype == "bool_":
        return np.not_equal(x, 0)
    if dtype in INTEGERS:
        return round_to_integer(x, dtype)
    return x.astype(target)


def sentinel(dtype: str) -> object:
    """What an uninitialised element reads as: NaN for floats, 4 for integers (simulator guide)."""
    return np.nan if dtype in FLOATS else 4
