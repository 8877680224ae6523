"""Rows and offsets chosen at run time in dma_copy, dma_transpose and dma_compute."""

from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError, NkiWarning, OutOfBoundsError

nl, nisa = nki.language, nki.isa
rng = np.random.default_rng(1)


@nki.jit
def scatter_kernel(values: Any, rows: Any, table: Any) -> Any:
    num, width = values.shape
    target = table.ap([[width, num], [1, width]], vector_offset=nl.load(rows), indirect_dim=0)
    nisa.dma_copy(target, nl.load(values), oob_mode=nisa.oob_mode.skip)
    return table


def test_scattered_rows_go_to_their_index_and_minus_one_is_left_out() -> None:
    values = rng.standard_normal((6, 8)).astype(np.float32)
    rows = np.array([[3], [-1], [0], [9], [5], [10]], np.int32)
    table = np.zeros((10, 8), np.float32)
    scatter_kernel(values, rows, table)
    expected = np.zeros((10, 8), np.float32)
    expected[[3, 0, 9, 5]] = values[[0, 2, 3, 4]]
    np.testing.assert_array_equal(table, expected)


def test_two_scattered_rows_with_one_index_are_written_in_an_undefined_order() -> None:
    values = np.ones((2, 4), np.float32)
    rows = np.array([[1], [1]], np.int32)
    text = "row 1 of dst 'table' is written more than once"
    with pytest.warns(NkiWarning, match=text):
        scatter_kernel(values, rows, np.zeros((3, 4), np.float32))
    with nki.strict(scatter_duplicate="error"), pytest.raises(NkiValidationError, match=text):
        scatter_kernel(values, rows, np.zeros((3, 4), np.float32))


def test_uint32_minus_one_is_out_of_range_too() -> None:
    table = np.zeros((3, 4), np.float32)
    rows = np.array([[0xFFFFFFFF], [2]], np.uint32)
    scatter_kernel(np.ones((2, 4), np.float32), rows, table)
    np.testing.assert_array_equal(table[:, 0], [0, 0, 1])


@pytest.mark.parametrize("in_sbuf", [True, False])
def test_a_scalar_offset_moves_the_start_by_rows_of_the_tensor(in_sbuf: bool) -> None:
    @nki.jit
    def kernel(table: Any, index: Any) -> Any:
        out = nl.ndarray((2, 4), dtype=table.dtype, buffer=nl.shared_hbm)
        offset: Any = nl.load(index)
        if not in_sbuf:
            tile = offset
            offset = nisa.register_alloc()
            nisa.register_load(offset, tile)
        nisa.dma_copy(out, table.ap([[4, 2], [1, 4]], scalar_offset=offset, indirect_dim=0))
        return out

    table = np.arange(20, dtype=np.float32).reshape(5, 4)
    np.testing.assert_array_equal(kernel(table, np.array([[3]], np.int32)), table[3:5])
    for bad in (4, -1):
        with pytest.raises(OutOfBoundsError, match=f"scalar offset {bad}"):
            kernel(table, np.array([[bad]], np.int32))


def test_a_gather_keeps_the_destination_rows_that_are_skipped() -> None:
    @nki.jit
    def kernel(table: Any, rows: Any) -> Any:
        out = nl.ndarray((3, 4), dtype=table.dtype, buffer=nl.shared_hbm)
        tile = nl.full((3, 4), 7, dtype=table.dtype)
        source = table.ap([[4, 3], [1, 4]], vector_offset=nl.load(rows), indirect_dim=0)
        nisa.dma_copy(tile, source, oob_mode=nisa.oob_mode.skip)
        nisa.dma_copy(out, tile)
        return out

    table = np.arange(8, dtype=np.int32).reshape(2, 4) + 2**30
    got = kernel(table, np.array([[1], [2], [0]], np.int32))
    np.testing.assert_array_equal(got, np.stack([table[1], np.full(4, 7), table[0]]))


def test_dma_compute_adds_gathered_rows_and_scatters_sums() -> None:
    @nki.jit
    def kernel(table: Any, rows: Any, values: Any) -> Any:
        tile = nl.load(values)
        view = table.ap([[4, 2], [1, 4]], vector_offset=nl.load(rows), indirect_dim=0)
        nisa.dma_compute(tile, [tile, view], nl.add)
        nisa.dma_compute(view, [view, tile], nl.add)
        return table

    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    values = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)
    expected = table.copy()
    expected[[2, 0]] += values + table[[2, 0]]
    np.testing.assert_array_equal(kernel(table, np.array([[2], [0]], np.int32), values), expected)


@pytest.mark.parametrize("columns", [1, 2])
def test_a_gather_transpose_reads_the_indices_column_by_column(columns: int) -> None:
    num = 128 * columns

    @nki.jit
    def kernel(table: Any, rows: Any) -> Any:
        out = nl.ndarray((8, num), dtype=table.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray((8, num), dtype=table.dtype)
        source = table.ap([[8, num], [1, 8]], vector_offset=nl.load(rows), indirect_dim=0)
        nisa.dma_transpose(tile, source)
        nisa.dma_copy(out, tile)
        return out

    table = rng.standard_normal((300, 8)).astype(np.float16)
    rows = rng.permutation(300)[:num].reshape(columns, 128).T.astype(np.uint32)
    np.testing.assert_array_equal(kernel(table, rows), table[rows.T.reshape(-1)].T)


@nki.strict(dynamic_operand="off")
def test_a_run_time_column_of_an_sbuf_tile_is_written_and_read_again() -> None:
    @nki.jit
    def kernel(values: Any, column: Any) -> Any:
        out = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.shared_hbm)
        tile = nl.zeros((4, 6), dtype=nl.bfloat16)
        wide = nl.ndarray((4, 6), dtype=nl.float32)
        nisa.tensor_scalar(wide, tile, nl.add, 0.0)
        target = tile.ap([[6, 4], [1, 2]], scalar_offset=nl.load(column), indirect_dim=1)
        nisa.dma_copy(target, nl.load(values))
        nisa.tensor_scalar(wide, tile, nl.add, 0.0)
        nisa.tensor_copy(wide[:, 0:1], tile.select(1, nl.load(column)))
        nisa.dma_copy(out, wide)
        return out

    values = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)
    expected = np.zeros((4, 6), np.float32)
    expected[:, 3:5], expected[:, 0] = values, values[:, 0]
    np.testing.assert_array_equal(kernel(values, np.array([[3]], np.int32)), expected)
