"""Casts of the engines and DMA, every dtype, and the precision switch."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats, run

nl, nisa = nki.language, nki.isa
INTEGERS = ["int8", "int16", "int32", "uint8", "uint16", "uint32"]
FLOATS = ["float16", "bfloat16", "float8_e4m3", "float8_e5m2", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", INTEGERS)
@nki.strict(dma_cast="off")
def test_floats_become_integers_by_rounding_to_even_and_saturating(dtype: str) -> None:
    info = np.iinfo(dtype)
    x = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, 3.49, 1e12, -1e12, np.inf, -np.inf]], np.float32)
    wide = np.array([[0, 2, 2, 0, -2, 3, info.max, info.min, info.max, info.min]], np.int64)
    expected = np.clip(wide, info.min, info.max)
    got = run(lambda dst, a: nisa.tensor_copy(dst, a), x, out=((1, 10), dtype))
    np.testing.assert_array_equal(got.astype(np.int64), expected)
    got = run(lambda dst, a: nisa.dma_copy(dst, a), x, out=((1, 10), dtype))
    np.testing.assert_array_equal(got.astype(np.int64), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_rounded_to_nearest_even_by_engines_and_dma(dtype: str) -> None:
    x = floats(8, 32)
    expected = x.astype(np.dtype(dtype))
    for copy in (nisa.tensor_copy, nisa.dma_copy):
        got = run(lambda dst, a, copy=copy: copy(dst, a), x, out=((8, 32), dtype))
        np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


def test_fp32_min_overflows_to_minus_infinity_in_narrow_floats() -> None:
    x = np.array([[np.finfo(np.float32).min, 1.0]], np.float32)
    for dtype in ("bfloat16", "float16", "float8_e5m2", "float8_e4m3"):
        got = run(lambda dst, a: nisa.tensor_copy(dst, a), x, out=((1, 2), dtype))
        assert got[0, 0] == -np.inf


def test_the_largest_e4m3_of_trn2_is_240() -> None:
    x = np.array([[240.0, 239.0, -240.0, 260.0]], np.float32)
    got = run(lambda dst, a: nisa.tensor_copy(dst, a), x, out=((1, 4), "float8_e4m3"))
    np.testing.assert_array_equal(got.astype(np.float32), [[240, 240, -240, np.inf]])
    got = run(lambda dst, a: nisa.tensor_copy(dst, a), x, out=((1, 4), "float8_e4m3fn"))
    np.testing.assert_array_equal(got.astype(np.float32), [[240, 240, -240, 256]])


def test_tfloat32_keeps_ten_mantissa_bits() -> None:
    x = np.array([[1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, np.inf]], np.float32)
    got = run(lambda dst, a: nisa.tensor_copy(dst, a), x, out=((1, 4), "tfloat32"))
    np.testing.assert_array_equal(got, [[1 + 2**-10, 1, 1 + 2**-9, np.inf]])


def test_copies_within_one_dtype_are_bit_exact() -> None:
    x = np.array([[2**31 - 1, -(2**31), 16777217]], np.int32)
    for copy in (nisa.tensor_copy, nisa.dma_copy):
        np.testing.assert_array_equal(run(lambda dst, a, copy=copy: copy(dst, a), x), x)
    nans = np.array([[0x7FC1, 0xFFFF, 0x7F80]], np.uint16).view(ml_dtypes.bfloat16)
    got = run(lambda dst, a: nisa.tensor_copy(dst, a), nans)
    np.testing.assert_array_equal(got.view(np.uint16), nans.view(np.uint16))


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, "float32", "bool"])
def test_arrays_of_every_dtype_go_in_and_come_out_unchanged(dtype: str) -> None:
    @nki.jit
    def kernel(a: Any) -> Any:
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, nl.load(a))
        return out

    x = np.arange(12).reshape(3, 4).astype(np.dtype(dtype))
    got = kernel(x)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("dtype", [np.float64, np.uint64, np.complex64])
def test_dtypes_that_the_device_lacks_are_refused(dtype: Any) -> None:
    @nki.jit
    def kernel(a: Any) -> None:
        nl.load(a)

    with pytest.raises(NkiValidationError, match="is not an NKI dtype; allowed"):
        kernel(np.ones((2, 2), dtype))


def test_dtypes_are_strings_that_numpy_understands() -> None:
    assert nl.bfloat16 == "bfloat16"
    assert np.zeros(2, nl.bfloat16).dtype == ml_dtypes.bfloat16
    assert np.zeros(2, nl.bool_).dtype == np.bool_


SWITCH = """
import ml_dtypes, numpy as np
from segattn.reference import nki
nl, nisa = nki.language, nki.isa

@nki.jit
def kernel(x):
    out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=nl.bfloat16, address=(0, 0))
    neighbour = nl.zeros(x.shape, dtype=nl.bfloat16)
    nisa.tensor_scalar(tile, nl.load(x), nl.multiply, 1.0)
    nisa.tensor_tensor(tile, tile, neighbour, nl.add)
    nisa.dma_copy(out, tile)
    return out

x = np.array([[1.0009765625]], np.float32)
print(float(kernel(x)[0, 0]))
half = np.array([[1.5]], ml_dtypes.bfloat16)
print(float(kernel(half)[0, 0]))
"""


@pytest.mark.parametrize(("switch", "value"), [("1", "1.0"), ("0", "1.0009765625")])
def test_nki_precise_fp_0_stores_low_precision_as_float32(switch: str, value: str) -> None:
    package = Path(nki.__file__).parents[2]
    root = package.parent if package.name == "segattn" else package
    done = subprocess.run(
        [sys.executable, "-c", SWITCH],
        env={**os.environ, "NKI_PRECISE_FP": switch, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        cwd=root,
    )
    assert done.stdout.split() == [value, "1.5"], done.stderr
