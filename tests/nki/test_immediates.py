"""Constants, addresses and indices that an instruction or a view cannot take."""

from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats, run

nl: Any = nki.language
nisa: Any = nki.isa
FP32_MIN = -3.4028235e38


def _one(value: float, dtype: str) -> Any:
    tile = nl.ndarray((1, 1), dtype=dtype, name="one")
    nisa.memset(tile, value)
    return tile


def _predicated(d: Any, value: float) -> None:
    nisa.tensor_copy_predicated(d, value, nl.ones(d.shape, dtype=nl.uint8))


@pytest.mark.parametrize(
    "fill",
    [
        lambda d, v: nisa.memset(d, v),
        lambda d, v: nisa.tensor_scalar(d, nl.zeros(d.shape, dtype=d.dtype), nl.add, v),
        lambda d, v: nisa.activation(d, nl.copy, nl.zeros(d.shape, dtype=d.dtype), bias=v),
        _predicated,
    ],
)
def test_a_constant_is_a_float32(fill: Any) -> None:
    x = floats(2, 4)
    for value in (FP32_MIN, float("inf"), 3.0):
        got = run(lambda dst, a, v=value: fill(dst, v), x)
        np.testing.assert_array_equal(got, np.full((2, 4), np.float32(value)))
    with pytest.raises(NkiValidationError, match=r"is 1e\+300, which is no float32"):
        run(lambda dst, a: fill(dst, 1e300), x)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            lambda d, x: nisa.dma_copy(
                d, x.ap([[4, 2], [1, 4]], scalar_offset=_one(1.0, "float32"), indirect_dim=1)
            ),
            "scalar_offset 'one' has dtype float32; allowed: integers",
        ),
        (lambda d, x: x.select(1, _one(1.0, "float32")), "dtype float32; allowed: one integer"),
        (lambda d, x: x.select(1, nl.zeros((1, 2), dtype=nl.int32)), "index of shape"),
        (
            lambda d, x: nisa.register_load(nisa.register_alloc(), _one(1.5, "float32")),
            "operand src 'one' has dtype float32; allowed here: integers",
        ),
        (lambda d, x: x[:, True], "index True on dimension 1"),
        (
            lambda d, x: nl.ndarray((2, 4), dtype=nl.float32, address=(0, 2)),
            r"address \(0, 2\) of a float32 tile; the byte offset must be a multiple of",
        ),
        (lambda d, x: nisa.iota(d, [[2**30, 4]]), "the engine computes them in int32"),
        (
            lambda d, x: nisa.affine_select(d, [[1, 4]], 2**31, x, 0.0),
            "the engine computes them in int32",
        ),
        (
            lambda d, x: nisa.range_select(
                d, x, nl.greater, nl.less, x[:, 0:1], x[:, 1:2], range_start=1.5
            ),
            "range_start is float; allowed: an int, a register",
        ),
    ],
)
def test_what_addresses_and_counts_is_an_integer(body: Any, text: str) -> None:
    with pytest.raises(NkiValidationError, match=text):
        run(body, floats(2, 4))


def test_addresses_of_narrow_elements_may_be_odd() -> None:
    @nki.jit
    def kernel() -> None:
        nl.ndarray((2, 4), dtype=nl.int8, address=(0, 3))
        nl.ndarray((2, 4), dtype=nl.bfloat16, address=(0, 6))

    kernel()
