"""Tile and block grids: which elements a cell is, against slices worked out by hand or NumPy."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError

nl: Any = nki.language  # the tests pass wrong types on purpose
nisa: Any = nki.isa


def build(body: Any, *arguments: Any) -> Any:
    """What `body` returns, run as a kernel."""

    @nki.jit
    def kernel(*given: Any) -> Any:
        return body(*given)

    return kernel(*arguments)


def test_the_documented_copy_of_a_tensor_tile_by_tile() -> None:
    def body(src: Any) -> Any:
        src_tiles = nl.tiles(src, tile_shape=(128, 256))
        assert isinstance(src_tiles, nl.NkiTileGrid)
        assert isinstance(src_tiles, nl.NkiGrid)
        assert (src_tiles.shape, src_tiles.tile_shape) == ((2, 4), (128, 256))
        assert (src_tiles.dtype, src_tiles.buffer) == ("float32", nl.shared_hbm)
        dst = nl.ndarray(src.shape, dtype=src.dtype, buffer=nl.shared_hbm)
        dst_tiles = nl.tiles(dst, tile_shape=(128, 256))
        for i in range(src_tiles.shape[0]):
            for j in range(src_tiles.shape[1]):
                src_tile = src_tiles[i, j]
                tile = nl.ndarray(src_tile.element_shape, dtype=src.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=tile.data, src=src_tile.data)
                nisa.dma_copy(dst=dst_tiles[i, j].data, src=tile.data)
        return dst

    x = np.arange(250 * 1000, dtype=np.float32).reshape(250, 1000)  # clamped in both dimensions
    np.testing.assert_array_equal(build(body, x), x)


SIZES = st.integers(1, 5)


@given(st.data())
def test_a_cell_holds_the_elements_that_numpy_slices(data: st.DataObject) -> None:
    extents = data.draw(st.tuples(SIZES, st.integers(1, 12), st.integers(1, 12)))
    tile = data.draw(st.tuples(SIZES, SIZES))
    block = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    x = np.arange(np.prod(extents), dtype=np.float32).reshape(extents)
    cells = tuple(t * b for t, b in zip(tile, block, strict=True))
    counts = tuple(-(-n // c) for n, c in zip(extents[1:], cells, strict=True))
    at = data.draw(st.tuples(*(st.integers(0, n - 1) for n in (extents[0], *counts))))
    inner = [slice(i * c, (i + 1) * c) for i, c in zip(at[1:], cells, strict=True)]
    expected = x[(at[0], *inner)]

    def body(source: Any) -> Any:
        grid = nl.blocks(source, tile_shape=tile, block_shape=block)
        cell = grid[at]
        assert grid.shape == (extents[0], *counts)
        assert (grid.block_shape, grid.tile_shape) == (block, tile)
        assert grid.index_step_elements == (1, *cells)
        assert (cell.shape, cell.element_shape) == ((), expected.shape)
        assert cell.is_remainder is (expected.shape != cells)
        np.testing.assert_array_equal(cell.data.numpy(), expected)
        inside = nl.tiles(cell)
        assert inside.shape == tuple(-(-n // t) for n, t in zip(expected.shape, tile, strict=True))
        np.testing.assert_array_equal(
            inside[-1, 0].data.numpy(),
            expected[(inside.shape[0] - 1) * tile[0] :, : tile[1]],
        )

    build(body, x)


@given(st.data())
def test_a_slice_of_cells_is_one_operand_while_it_has_no_gaps(data: st.DataObject) -> None:
    tile, rows = data.draw(SIZES), data.draw(st.integers(1, 20))
    count = -(-rows // tile)
    start = data.draw(st.integers(0, count - 1))
    stop, step = data.draw(st.integers(start + 1, count)), data.draw(st.integers(1, 3))
    x = np.arange(rows * 6, dtype=np.float32).reshape(rows, 6)
    chosen = range(start, stop, step)
    expected = np.concatenate([x[i * tile : (i + 1) * tile] for i in chosen])

    def body(source: Any) -> Any:
        grid = nl.tiles(source, tile_shape=(tile, 3))[start:stop:step, 1]
        assert grid.element_shape == (len(expected), 3)
        assert grid.shape == (len(chosen),)
        gaps = step > 1 and len(chosen) > 1 and tile > 1
        assert grid.is_data_representable is not gaps
        for i in range(len(chosen)):
            np.testing.assert_array_equal(
                grid[i].data.numpy(), expected[i * tile : (i + 1) * tile, 3:]
            )
        if gaps:
            with pytest.raises(NkiValidationError, match="no one access pattern covers them"):
                _ = grid.data
        else:
            np.testing.assert_array_equal(grid.data.numpy(), expected[:, 3:])
        packed = nl.empty_like(grid)
        assert packed.element_shape == grid.element_shape
        assert packed.shape == grid.shape
        assert packed.is_data_representable

    build(body, x)


def test_tiles_allocated_on_the_chip_lie_side_by_side() -> None:
    def body(src: Any) -> Any:
        tiles = nl.alloc_tiles(
            tile_shape=(128, 8), element_shape=(300, 20), buffer=nl.sbuf, dtype=nl.float32
        )
        assert (tiles.shape, tiles.element_shape) == ((3, 3), (300, 20))
        sources = nl.tiles(src, tile_shape=(128, 8))
        out = nl.ndarray(src.shape, dtype=src.dtype, buffer=nl.shared_hbm)
        targets = nl.tiles(out, tile_shape=(128, 8))
        for i in range(3):
            for j in range(3):
                nisa.dma_copy(tiles[i, j].data, sources[i, j].data)
        for i in range(3):  # a row of tiles is one operand
            row = tiles[i, :].data
            assert row.shape == (128 if i < 2 else 44, 20)
            nisa.tensor_scalar(row, row, nl.multiply, 2.0)
            nisa.dma_copy(targets[i, :].data, row)
        assert tiles[2, 2].is_remainder
        with pytest.raises(NkiValidationError, match="no one access pattern"):
            _ = tiles[:, 0].data
        return out

    x = np.arange(300 * 20, dtype=np.float32).reshape(300, 20)
    np.testing.assert_array_equal(build(body, x), 2 * x)


def test_tiles_of_three_dimensions_keep_their_shape_on_the_chip() -> None:
    def body(src: Any) -> Any:
        grid = nl.alloc_blocks(
            tile_shape=(4, 2, 3),
            block_shape=(1, 2, 1),
            element_shape=(6, 4, 5),
            buffer=nl.sbuf,
            dtype=nl.float32,
        )
        assert isinstance(grid, nl.NkiBlockGrid)
        assert (grid.shape, grid.block_shape) == ((2, 1, 2), (1, 2, 1))
        sources = nl.tiles(src, tile_shape=(4, 2, 3))
        out = nl.ndarray(src.shape, dtype=src.dtype, buffer=nl.shared_hbm)
        targets = nl.tiles(out, tile_shape=(4, 2, 3))
        inside = nl.tiles(grid)
        assert inside.shape == (2, 2, 2)
        for i in range(2):
            for j in range(2):
                for k in range(2):
                    nisa.dma_copy(inside[i, j, k].data, sources[i, j, k].data)
                    nisa.dma_copy(targets[i, j, k].data, inside[i, j, k].data)
        return out

    x = np.arange(120, dtype=np.float32).reshape(6, 4, 5)
    np.testing.assert_array_equal(build(body, x), x)


@pytest.mark.parametrize(
    ("shape", "axes"), [((16, 32), (1, 0)), ((2, 3, 8), (2, 1, 0)), ((2, 3, 1, 8), (3, 1, 2, 0))]
)
def test_empty_like_makes_the_destination_of_a_transpose(
    shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    def body(src: Any) -> None:
        made = nl.empty_like(src, transpose_axes=axes)
        assert (made.shape, made.buffer) == (tuple(shape[a] for a in axes), nl.sbuf)
        grid = nl.empty_like(nl.tiles(src, tile_shape=shape), transpose_axes=axes)
        assert grid.tile_shape == made.shape
        with pytest.raises(NkiValidationError, match="transpose_axes"):
            nl.empty_like(src, transpose_axes=tuple(range(len(shape))))
        with pytest.raises(NkiValidationError, match="at most 128 in sbuf"):
            nl.empty_like(src, buffer=nl.psum, transpose_axes=axes)

    build(body, np.zeros(shape, np.float32))


def test_empty_like_puts_a_tensor_at_an_address() -> None:
    def body() -> None:
        tile = nl.ndarray((4, 8), nl.float32)
        first = nl.empty_like(tile, address=(0, 0))
        nisa.memset(first, 1.0)
        second = nl.empty_like(tile, dtype=nl.bfloat16, address=(0, 16))
        nisa.memset(second, 2.0)
        with pytest.raises(NkiValidationError, match="address_overlap"):
            nl.copy(first)

    build(body)


@pytest.mark.parametrize(
    ("misuse", "error", "text"),
    [
        (lambda x: nl.tiles(x), TypeError, "tile_shape is None; allowed: a tuple of ints"),
        (lambda x: nl.tiles(x, tile_shape=[4, 4]), TypeError, "a tuple of ints"),
        (lambda x: nl.tiles(x, tile_shape=(4, 0)), ValueError, "sizes of at least 1"),
        (lambda x: nl.tiles(x, tile_shape=(4,)), ValueError, "2 to 2 dimensions"),
        (lambda x: nl.tiles(x, tile_shape=(1, 4, 4)), ValueError, "2 to 2 dimensions"),
        (
            lambda x: nl.tiles(nl.zeros((2, 4, 4), nl.float32), tile_shape=(4, 4)),
            ValueError,
            "only HBM tensors have untiled",
        ),
        (
            lambda x: nl.blocks(x, tile_shape=(4, 4), block_shape=(1,)),
            ValueError,
            "the ranks must agree",
        ),
        (lambda x: nl.tiles(x, tile_shape=(4, 4))[0, 0, 0], NkiValidationError, "3 entries"),
        (lambda x: nl.tiles(x, tile_shape=(4, 4))[2], NkiValidationError, "index 2 of 2 cells"),
        (lambda x: nl.tiles(x, tile_shape=(4, 4))[1:1], NkiValidationError, "at least one cell"),
        (
            lambda x: nl.tiles(x, tile_shape=(4, 4))[nisa.register_alloc(0)],
            TypeError,
            "where Python needs an integer",
        ),
        (
            lambda x: nl.blocks(nl.tiles(x, tile_shape=(2, 4))[::2], block_shape=(2, 1)),
            NkiValidationError,
            "cells of another size would straddle",
        ),
        (
            lambda x: nl.alloc_tiles(
                tile_shape=(4, 4), element_shape=(8, 8), buffer="sbuf", dtype=nl.float32
            ),
            TypeError,
            "buffer is 'sbuf'",
        ),
        (lambda x: iter(nl.tiles(x, tile_shape=(4, 4))), TypeError, "not iterable"),
    ],
)
def test_what_is_no_grid_is_named(misuse: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        build(lambda x: misuse(x) and None, np.zeros((8, 8), np.float32))
