"""Behaviour that releases 0.2.0 to 0.6.0 of the official simulator had to fix, as tests of ours.

Fixes that another test file pins are not repeated: reduce commands, dtype casts, skipped rows,
accumulation, 255 in shuffles, searches of eight values.
"""

from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats, run

nl: Any = nki.language
nisa: Any = nki.isa
command = nisa.reduce_cmd


def test_activation_reduces_nothing_by_default() -> None:
    """0.2.0: the default reduce command is idle."""

    def body(dst: Any, a: Any) -> None:
        nisa.activation(dst, nl.copy, a, reduce_op=nl.add, reduce_cmd=command.reset_reduce)
        nisa.activation(dst, nl.copy, a)
        total = nl.ndarray((4, 1), dtype=nl.float32)
        nisa.activation(dst, nl.copy, a, reduce_res=total)
        nisa.tensor_copy(dst[:, 0:1], total)

    x = np.ones((4, 8), np.float32)
    np.testing.assert_array_equal(run(body, x)[:, 0], np.full(4, 8))


def test_activation_bias_has_one_element_per_partition() -> None:
    """0.2.0: the bias shape is checked."""
    with pytest.raises(NkiValidationError, match=r"operand bias .* \[4, 1\]"):
        run(lambda dst, a: nisa.activation(dst, nl.copy, a, bias=a[:, 0:2]), floats(4, 8))


def test_tensor_reduce_axis_is_the_axis_of_the_tensor() -> None:
    """0.3.0: axis 2 of a 3-D tile is its last axis."""
    x = floats(4, 2, 3)
    got = run(lambda dst, a: nisa.tensor_reduce(dst, nl.add, a, 2), x, out=((4, 2), "float32"))
    np.testing.assert_allclose(got, x.sum(axis=2), rtol=1e-6)


def test_range_select_honours_its_reduce_command() -> None:
    """0.3.0: reduce goes on from the earlier maximum, reset_reduce does not."""
    bounds = np.array([[0.0], [0.0]], np.float32)

    def body(dst: Any, a: Any, b: Any, second: Any) -> None:
        scratch = nl.ndarray((2, 4), dtype=nl.float32)
        nisa.range_select(scratch, a, nl.greater_equal, nl.greater_equal, b, b)
        nisa.tensor_scalar(scratch, a, nl.subtract, 10.0)
        nisa.range_select(
            scratch,
            scratch,
            nl.greater_equal,
            nl.greater_equal,
            b,
            b,
            reduce_cmd=second,
            reduce_res=dst,
        )

    x = floats(2, 4)
    for second, shift in ((command.reduce, 0), (command.reset_reduce, 10)):
        got = run(
            lambda dst, a, b, second=second: body(dst, a, b, second),
            x,
            bounds,
            out=((2, 1), "float32"),
        )
        np.testing.assert_allclose(got[:, 0], x.max(axis=1) - shift, rtol=1e-6)


@pytest.mark.parametrize("offset", [0, 5, -3])
def test_iota_and_affine_select_take_registers_as_offset(offset: int) -> None:
    """0.4.0."""
    x = floats(4, 8)

    def body(dst: Any, a: Any) -> None:
        register = nisa.register_alloc(offset)
        nisa.affine_select(dst, [[1, 8]], -1, a, 0.0, nl.greater_equal, offset=register)
        index = nl.ndarray((4, 8), dtype=nl.int32)
        nisa.iota(index, [[1, 8]], offset=register)
        nisa.tensor_tensor(dst, dst, index, nl.add)

    affine = np.arange(8) - np.arange(4)[:, None] + offset
    expected = np.where(affine >= 0, x, 0) + np.arange(8, dtype=np.float32) + offset
    np.testing.assert_allclose(run(body, x), expected, rtol=1e-6)


def test_iota_and_select_registers_may_come_from_a_loop() -> None:
    """0.4.0, 0.5.0: a loop's induction register; the loop ends."""

    def body(dst: Any, a: Any) -> None:
        nisa.memset(dst, 0.0)

        def step(i: Any) -> None:
            row = nl.ndarray((1, 4), dtype=nl.float32)
            nisa.iota(row, [[1, 4]], offset=i)
            nisa.tensor_tensor(dst, dst, row, nl.add)

        nl.fori_loop(0, 3, step)

    got = run(body, np.zeros((1, 4), np.float32))
    np.testing.assert_array_equal(got[0], 3 * np.arange(4) + 3)


def test_logical_and_treats_every_nonzero_value_as_true() -> None:
    """0.4.0."""
    x = np.array([[0.0, 0.5, -2.0, 3.0]], np.float32)
    got = run(lambda dst, a: nisa.tensor_scalar(dst, a, nl.logical_and, 0.25), x)
    np.testing.assert_array_equal(got, [[0, 1, 1, 1]])


def test_local_gather_works_on_a_part_of_a_tile() -> None:
    """0.4.0: sub-views of the source."""
    x, index = floats(16, 12), np.arange(16, dtype=np.uint16).reshape(16, 1) % 6

    def body(dst: Any, a: Any, i: Any) -> None:
        nisa.local_gather(dst, a[:, 6:12], i)

    got = run(body, x, index, out=((16, 16), "float32"))
    np.testing.assert_array_equal(got, x[:, 6 + index[:, 0]])


def test_the_reduction_of_an_activation_may_land_in_its_destination() -> None:
    """0.6.0: dst may alias reduce_res; the register is stored last."""
    x = floats(4, 6)

    def body(dst: Any, a: Any) -> None:
        nisa.activation_reduce(dst, nl.exp, a, nl.add, dst[:, 5:6])

    got = run(body, x)
    np.testing.assert_allclose(got[:, :5], np.exp(x[:, :5]), rtol=1e-6)
    np.testing.assert_allclose(got[:, 5], np.exp(x).sum(axis=1), rtol=1e-6)


@pytest.mark.parametrize("select", ["copy", "reduce"])
def test_predicates_of_another_rank_are_matched_by_elements(select: str) -> None:
    """0.6.0: tensor_copy_predicated and select_reduce."""
    x, mask = floats(4, 2, 3), (np.arange(24).reshape(4, 6) % 2).astype(np.uint8)

    def body(dst: Any, a: Any, m: Any) -> None:
        nisa.memset(dst, -1.0)
        if select == "copy":
            nisa.tensor_copy_predicated(dst, a, m)
        else:
            nisa.select_reduce(dst, m, a, -1.0)

    got = run(body, x, mask, out=((4, 3, 2), "float32"))
    expected = np.where(mask, x.reshape(4, 6), -1)
    np.testing.assert_array_equal(got.reshape(4, 6), expected)


def test_a_false_value_of_affine_select_is_a_float_for_integer_tiles_too() -> None:
    """0.6.0."""
    x = np.arange(8, dtype=np.int32).reshape(1, 8)
    got = run(lambda dst, a: nisa.affine_select(dst, [[1, 8]], 0, a, -9.0, nl.less, offset=-4), x)
    np.testing.assert_array_equal(got[0], [0, 1, 2, 3, -9, -9, -9, -9])


def test_overlapping_accumulation_regions_add_where_they_overlap() -> None:
    """0.6.0: partly overlapping destinations of one group."""
    one, row = np.ones((1, 2), np.float32), np.ones((1, 8), np.float32)

    def body(dst: Any, s: Any, m: Any) -> None:
        nisa.nc_matmul(dst[:, 0:6], s, m[:, 0:6])
        nisa.nc_matmul(dst[:, 4:8], s, m[:, 4:8])
        nisa.nc_matmul(dst[:, 4:8], s, m[:, 4:8], accumulate=True)

    got = run(body, one, row, out=((2, 8), "float32"), psum=True)
    np.testing.assert_array_equal(got[0], [1, 1, 1, 1, 3, 3, 2, 2])
