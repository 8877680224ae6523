"""Every instruction that computes on integers in fp32 says when one of them is lost."""

from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import run

# the lambdas are bodies of tiny kernels
nl: Any = nki.language
nisa: Any = nki.isa

ODD = 2**20 + 1
ROW = np.full((4, 17), ODD, np.int32)  # sums to 17 * (2**20 + 1), which has 25 bits


def _row_of(x: Any, dtype: str = "int32") -> Any:
    return nl.ndarray((x.shape[0], 1), dtype=dtype)


def _tensor_reduce(dst: Any, x: Any) -> None:
    nisa.tensor_reduce(_row_of(x), nl.add, x, 1)
    nisa.tensor_copy(dst, x)


def _tensor_reduce_to_fp32(dst: Any, x: Any) -> None:
    nisa.tensor_reduce(_row_of(x, "float32"), nl.add, x, 1)
    nisa.tensor_copy(dst, x)


def _product(dst: Any, x: Any) -> None:
    nisa.tensor_reduce(_row_of(x), nl.multiply, x[:, 0:2], 1)
    nisa.tensor_copy(dst, x)


def _scalar_reduce(dst: Any, x: Any) -> None:
    nisa.tensor_scalar_reduce(dst, x, nl.multiply, 1.0, nl.add, _row_of(x, "float32"))


def _partition_reduce(dst: Any, x: Any) -> None:
    column = nl.ndarray((17, 4), dtype=nl.int32)
    nisa.memset(column, ODD)
    nisa.tensor_partition_reduce(nl.ndarray((1, 4), dtype=nl.int32), nl.add, column)
    nisa.tensor_copy(dst, x)


def _scan(dst: Any, x: Any) -> None:
    zeros = nl.zeros(x.shape, dtype=nl.int32)
    nisa.tensor_tensor_scan(dst, x, zeros, 0.0, nl.add, nl.add)


def _scalar_tensor(dst: Any, x: Any) -> None:
    nisa.scalar_tensor_tensor(dst, x, nl.multiply, 16.0, nl.add, x)


def _scalar_tensor_inside(dst: Any, x: Any) -> None:
    nisa.scalar_tensor_tensor(dst, x, nl.multiply, 17.0, nl.minimum, x)


def _two_operators(dst: Any, x: Any) -> None:
    nisa.tensor_scalar(dst, x, nl.multiply, 17.0, op1=nl.subtract, operand1=16.0 * 2**20)


def _narrow_to_wide(dst: Any, x: Any) -> None:
    narrow = nl.ndarray(x.shape, dtype=nl.int16)
    nisa.memset(narrow, 5001)
    nisa.tensor_tensor(dst, narrow, narrow, nl.multiply)


def _activation(dst: Any, x: Any) -> None:
    nisa.activation(dst, nl.copy, x, scale=17.0)


def _activation_sum(dst: Any, x: Any) -> None:
    nisa.activation_reduce(dst, nl.copy, x, nl.add, _row_of(x, "float32"))


def _dma_sum(dst: Any, x: Any) -> None:
    nisa.dma_compute(dst, [x] * 16 + [], nl.add)


def _dma_sum_of_large(dst: Any, x: Any) -> None:
    other = nl.full(x.shape, 2**24, dtype=nl.int32)
    nisa.dma_compute(dst, [x, other], nl.add)


def _immediate(dst: Any, x: Any) -> None:
    nisa.tensor_scalar(dst, x, nl.add, 2**24 + 1)


def _column_immediate(dst: Any, x: Any) -> None:
    nisa.scalar_tensor_tensor(dst, x, nl.add, 2**24 + 1, nl.add, x)


def _memset(dst: Any, x: Any) -> None:
    nisa.memset(nl.ndarray((4, 4), dtype=nl.float32), 2**24 + 1)
    nisa.tensor_copy(dst, x)


def _iota(dst: Any, x: Any) -> None:
    nisa.iota(nl.ndarray((4, 4), dtype=nl.float32), [[1, 4]], offset=2**24)
    nisa.tensor_copy(dst, x)


@pytest.mark.parametrize(
    ("body", "lost"),
    [
        (_tensor_reduce, 17 * ODD),
        (_tensor_reduce_to_fp32, 17 * ODD),
        (_product, ODD * ODD),
        (_scalar_reduce, 17 * ODD),
        (_partition_reduce, 17 * ODD),
        (_scan, 17 * ODD),
        (_scalar_tensor, 17 * ODD),
        (_scalar_tensor_inside, 17 * ODD),
        (_two_operators, 17 * ODD),
        (_narrow_to_wide, 5001 * 5001),
        (_activation, 17 * ODD),
        (_activation_sum, 17 * ODD),
        (_dma_sum_of_large, 2**24 + ODD),
        (_immediate, 2**24 + 1),
        (_column_immediate, 2**24 + 1),
        (_memset, 2**24 + 1),
        (_iota, 2**24 + 1),
    ],
)
@nki.strict(integer_reduce="off")
def test_an_integer_that_fp32_loses_is_reported(body: Any, lost: int) -> None:
    with pytest.raises(NkiValidationError, match=rf"{lost}.*\[rule inexact_integer\]"):
        run(body, ROW)
    with nki.strict(inexact_integer="off"):
        run(body, ROW)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (_scan, np.cumsum(np.full((4, 17), 2**20), axis=1)),
        (_scalar_tensor, np.full((4, 17), 17 * 2**20)),
        (_two_operators, np.full((4, 17), 2**20)),
        (_activation, np.full((4, 17), 17 * 2**20)),
        (_dma_sum, np.full((4, 17), 2**24)),
        (_scalar_reduce, np.full((4, 17), 2**20)),
        (_tensor_reduce_to_fp32, np.full((4, 17), 2**20)),
    ],
)
@nki.strict(integer_reduce="off")
def test_large_integers_that_fp32_holds_pass(body: Any, expected: Any) -> None:
    np.testing.assert_array_equal(run(body, np.full((4, 17), 2**20, np.int32)), expected)


@pytest.mark.parametrize("dtype", ["float32", "uint32"])
@nki.strict(dma_cast="off")
def test_a_dma_that_casts_a_large_integer_goes_through_fp32(dtype: str) -> None:
    def moved(value: int) -> Any:
        x = np.full((4, 4), value, np.int32)
        return run(lambda dst, a: nisa.dma_copy(dst, a), x, out=((4, 4), dtype))

    np.testing.assert_array_equal(moved(2**24 + 2), np.full((4, 4), 2**24 + 2))
    with pytest.raises(NkiValidationError, match="operand src holds 16777217"):
        moved(2**24 + 1)


def test_a_low_precision_sum_of_integers_may_round() -> None:
    def body(dst: Any, x: Any) -> None:
        nisa.tensor_reduce(_row_of(x, "bfloat16"), nl.add, x, 1)
        nisa.tensor_copy(dst, x)

    np.testing.assert_array_equal(run(body, ROW), ROW)
