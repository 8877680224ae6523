"""Tiles in and out of SBUF: rows with their padding replaced, columns, values.

A *row tile* is 128 rows of d elements on 128 partitions. Rows that must not matter may hold NaN or
infinity, so they are replaced by zero with a select; a multiplication would keep the NaN.
"""

from dataclasses import dataclass
from typing import Any

from ..backend import nisa, nl
from ..sizes import PARTITIONS


@dataclass
class RowTiles(nl.NKIObject):
    """Row tiles inside a wider SBUF tile: tile t is `width` columns of it."""

    rows: nl.NkiTensor  # [128, ...] SBUF
    tile_stride: int  # columns from one row tile to the next
    width: int
    first: int = 0  # column where tile 0 starts

    def tile(self, index: int) -> nl.NkiTensor:
        """One row tile, [128, width]."""
        first = self.first + index * self.tile_stride
        return self.rows[:, first : first + self.width]


def broadcast_row(numbers: nl.NkiTensor) -> nl.NkiTensor:
    """A [1, n] HBM row in fp32 on every partition, [128, n]."""
    count = numbers.shape[1]
    tile = nl.ndarray((PARTITIONS, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=numbers.ap([[0, PARTITIONS], [1, count]]))
    return tile


def inverse_scales(scales: nl.NkiTensor | None) -> nl.NkiTensor | None:
    """Reciprocals of [1, KV] HBM scales on every partition, [128, KV] fp32."""
    if scales is None:
        return None
    inverse = broadcast_row(scales)
    nisa.reciprocal(dst=inverse, data=inverse)
    return inverse


def zero_rows(rows: nl.NkiTensor, valid: nl.NkiTensor, dtype: str) -> nl.NkiTensor:
    """`rows` [128, n] cast to `dtype`, zero wherever the predicate `valid` (128 x n) is 0."""
    kept = nl.ndarray(rows.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.select_reduce(dst=kept, predicate=valid, on_true=rows, on_false=0.0)
    return kept


def row_tile_view(
    hbm: nl.NkiTensor,  # [heads, S, d]
    first_head: int,
    num_heads: int,
    first_tile: int,
    num_tiles: int,
) -> nl.NkiTensor:
    """Row tiles of consecutive heads in HBM as [128, row tile, head, d]."""
    _, num_rows, d = hbm.shape
    return hbm.ap(
        [[d, PARTITIONS], [PARTITIONS * d, num_tiles], [num_rows * d, num_heads], [1, d]],
        offset=(first_head * num_rows + first_tile * PARTITIONS) * d,
    )


def runs_of(row_tiles: list[int], first: int, count: int) -> list[tuple[int, int]]:
    """Entries first .. first + count - 1 of a list of row tiles as runs that follow each other.

    One run, or single entries: (index of the first, how many).
    """
    if row_tiles[first + count - 1] - row_tiles[first] == count - 1:
        return [(first, count)]
    runs: list[tuple[int, int]] = []
    for i in range(first, first + count):
        runs.append((i, 1))
    return runs


def each_element(
    valid: nl.NkiTensor,  # [128, tiles] uint8
    num_heads: int,
    d: int,
) -> nl.NkiTensor:
    """A predicate of row tiles for every head and element of them."""
    tiles = valid.shape[1]
    return valid.ap([[tiles, PARTITIONS], [1, tiles], [0, num_heads], [0, d]])


def new_columns(num_tiles: int, d: int, dtype: str) -> list[nl.NkiTensor]:
    """Unwritten columns of row tiles, [<= 128, num_tiles * 128] per 128 features of d."""
    columns: list[nl.NkiTensor] = []
    for first in range(0, d, PARTITIONS):
        shape = (min(PARTITIONS, d - first), num_tiles * PARTITIONS)
        columns.append(nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf))
    return columns


def transpose_features(
    pipeline: Any,  # BoundedRows or ExactRows, whose PSUM is used
    rows: nl.NkiTensor,  # [128, tiles * d] SBUF
    d: int,
    first: int,
    num_tiles: int,
    columns: list[nl.NkiTensor],  # from new_columns, result
    first_column: int,  # number of the first tile in it
) -> None:
    """Row tiles as columns, 128 features at a time."""
    begin = first_column * PARTITIONS
    for part in range(len(columns)):
        first_feature = part * PARTITIONS
        width = min(PARTITIONS, d - first_feature)
        own = columns[part]
        pipeline.transpose(
            RowTiles(rows, d, width, first_feature), first, num_tiles,
            own[:, begin : begin + num_tiles * PARTITIONS],
        )  # fmt: skip


def values_with_ones(
    stage: nl.NkiTensor,  # [128, tiles * d] SBUF
    present: nl.NkiTensor,  # [128, tiles] uint8
    values: nl.NkiTensor,  # [128, tiles * (d + 1)] SBUF, result
    first: int,
    count: int,
) -> None:
    """Value rows of some tiles next to a column of ones; all zero where a row is absent."""
    tiles = present.shape[1]
    d = stage.shape[1] // tiles
    width = tiles * (d + 1)
    nisa.select_reduce(
        dst=values.ap([[width, PARTITIONS], [d + 1, count], [1, d]], offset=first * (d + 1)),
        predicate=present.ap([[tiles, PARTITIONS], [1, count], [0, d]], offset=first),
        on_true=stage[:, first * d : (first + count) * d],
        on_false=0.0,
    )
    nisa.tensor_copy(
        dst=values.ap([[width, PARTITIONS], [d + 1, count], [1, 1]], offset=first * (d + 1) + d),
        src=present[:, first : first + count],
    )


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a floating dtype that PE moves."""
    if dtype == nl.float32:
        return 4
    return 2
