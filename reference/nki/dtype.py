"""`nki.dtype`: the dtypes under the module that some kernels import them from."""

from .language import (
    bfloat16,
    bool_,
    float8_e4m3,
    float8_e4m3fn,
    float8_e5m2,
    float8_e8m0fnu,
    float16,
    float32,
    int8,
    int16,
    int32,
    tfloat32,
    uint8,
    uint16,
    uint32,
)

__all__ = [
    "bfloat16",
    "bool_",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float16",
    "float32",
    "int8",
    "int16",
    "int32",
    "tfloat32",
    "uint8",
    "uint16",
    "uint32",
]
