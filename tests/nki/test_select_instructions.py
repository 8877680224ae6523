"""iota, affine_select, range_select, select_reduce, tensor_copy_predicated."""

from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats, run

nl, nisa = nki.language, nki.isa
FP32_MIN = np.finfo(np.float32).min


def test_iota_adds_offset_channel_and_pattern() -> None:
    got = run(
        lambda dst: nisa.iota(dst, [[10, 3], [1, 4]], offset=-5, channel_multiplier=100),
        out=((4, 12), "int32"),
    )
    p, i, j = np.ogrid[:4, :3, :4]
    np.testing.assert_array_equal(got, (-5 + 100 * p + 10 * i + j).reshape(4, 12))


def test_iota_needs_a_pattern_of_the_free_size() -> None:
    with pytest.raises(NkiValidationError, match="generates 8 values, the tile has 12"):
        run(lambda dst: nisa.iota(dst, [[1, 8]]), out=((4, 12), "int32"))


@pytest.mark.parametrize("op", [nl.less_equal, nl.equal, nl.greater])
def test_affine_select_compares_the_affine_value_with_zero(op: Any) -> None:
    x = floats(8, 16)
    got = run(lambda dst, a: nisa.affine_select(dst, [[1, 16]], -1, a, -9.0, op, offset=-2), x)
    affine = -2 - np.arange(8)[:, None] + np.arange(16)[None, :]
    compare = {"less_equal": np.less_equal, "equal": np.equal, "greater": np.greater}[op.__name__]
    np.testing.assert_array_equal(got, np.where(compare(affine, 0), x, np.float32(-9)))


def test_range_select_keeps_indices_within_both_bounds_and_reduces() -> None:
    x = floats(4, 10)
    low = np.array([[0], [3], [5], [9]], np.float32)
    high = np.array([[4], [3], [99], [0]], np.float32)
    rows: dict[str, Any] = {}

    def body(dst: Any, a: Any, b0: Any, b1: Any) -> None:
        largest = nl.ndarray((4, 1), dtype=nl.float32)
        nisa.range_select(
            dst, a, nl.greater_equal, nl.less_equal, b0, b1, reduce_res=largest, range_start=2
        )
        rows["largest"] = largest.numpy()

    index = 2 + np.arange(10)
    expected = np.where((index >= low) & (index <= high), x, FP32_MIN)
    np.testing.assert_array_equal(run(body, x, low, high), expected)
    np.testing.assert_array_equal(rows["largest"], expected.max(axis=1, keepdims=True))


def test_range_select_refuses_another_fill_value() -> None:
    with pytest.raises(NkiValidationError, match=r"on_false_value is 0\.0; allowed: FP32_MIN"):
        run(
            lambda dst, a, b: nisa.range_select(dst, a, nl.less, nl.less, b, b, on_false_value=0.0),
            floats(4, 10),
            np.zeros((4, 1), np.float32),
        )


@pytest.mark.parametrize("reverse", [False, True])
def test_select_reduce_takes_a_row_vector_where_the_predicate_is_false(reverse: bool) -> None:
    x, other = floats(6, 8), floats(6, 1, seed=1)
    predicate = np.random.default_rng(2).integers(0, 2, (6, 8)).astype(np.uint8)
    rows: dict[str, Any] = {}

    def body(dst: Any, a: Any, mask: Any, b: Any) -> None:
        largest = nl.ndarray((6, 1), dtype=nl.float32)
        nisa.select_reduce(
            dst.reshape((6, 2, 4)),
            mask,
            a,
            b,
            reduce_res=largest,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
            reverse_pred=reverse,
        )
        rows["largest"] = largest.numpy()

    expected = np.where((predicate != 0) != reverse, x, other)
    np.testing.assert_array_equal(run(body, x, predicate, other), expected)
    np.testing.assert_array_equal(rows["largest"], expected.max(axis=1, keepdims=True))


def test_a_predicated_copy_leaves_the_other_elements_alone() -> None:
    x, y = floats(4, 6), floats(4, 6, seed=1)
    predicate = (np.arange(24).reshape(4, 6) % 3 == 0).astype(np.uint8)

    def body(dst: Any, a: Any, b: Any, mask: Any) -> None:
        nisa.tensor_copy(dst, a)
        nisa.tensor_copy_predicated(dst, b, mask)

    np.testing.assert_array_equal(run(body, x, y, predicate), np.where(predicate, y, x))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_a_predicate_is_an_unsigned_integer(dtype: Any) -> None:
    with pytest.raises(NkiValidationError, match="allowed: uint16, uint32, uint8"):
        run(
            lambda dst, a, m: nisa.tensor_copy_predicated(dst, a, m),
            floats(2, 4),
            np.ones((2, 4), dtype),
        )
