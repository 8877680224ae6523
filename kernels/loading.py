"""Tiles in and out of SBUF: rows with their padding replaced, transposes, paged rows.

A *row tile* is 128 rows of d elements on 128 partitions. Rows that must not matter may hold NaN or
infinity, so they are replaced by zero with a select; a multiplication would keep the NaN.
"""

from dataclasses import dataclass

from .backend import nisa, nl
from .tile_schedule import PARTITIONS, PSUM_BANK_BYTES


@dataclass
class RowTiles(nl.NKIObject):
    """Row tiles inside a wider SBUF tile: tile t is `parts` pieces of `width` columns."""

    rows: nl.NkiTensor  # [128, ...] SBUF
    tile_stride: int  # columns from one row tile to the next
    width: int
    first: int = 0  # column where tile 0 starts
    parts: int = 1
    part_stride: int = 0  # columns from one piece of a tile to the next

    def tile(self, index: int) -> nl.NkiTensor:
        """One row tile, [128, parts, width]."""
        return self.rows.ap(
            [[self.rows.shape[1], PARTITIONS], [self.part_stride, self.parts], [1, self.width]],
            offset=self.first + index * self.tile_stride,
        )


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


def number_register(number: nl.NkiTensor) -> nisa.VirtualRegister:
    """A [1, 1] int32 HBM number in a register, for loop bounds."""
    tile = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=number)
    register = nisa.register_alloc()
    nisa.register_load(register, tile)
    return register


def zero_rows(rows: nl.NkiTensor, valid: nl.NkiTensor, dtype: str) -> nl.NkiTensor:
    """`rows` [128, n] cast to `dtype`, zero wherever the predicate `valid` (128 x n) is 0."""
    kept = nl.ndarray(rows.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.select_reduce(dst=kept, predicate=valid, on_true=rows, on_false=0.0)
    return kept


def load_row_tiles(
    hbm: nl.NkiTensor,  # [heads, S, d]
    first_head: int,
    num_heads: int,
    row_tiles: list[int],
) -> nl.NkiTensor:
    """The same row tiles of consecutive heads, [128, (row tile, head, d)]."""
    _, num_rows, d = hbm.shape
    tiles = len(row_tiles)
    rows = nl.ndarray((PARTITIONS, tiles * num_heads * d), dtype=hbm.dtype, buffer=nl.sbuf)
    if tiles * PARTITIONS == num_rows:
        nisa.dma_copy(dst=rows, src=row_tile_view(hbm, first_head, num_heads, 0, tiles))
    else:
        for i in range(tiles):
            nisa.dma_copy(
                dst=rows[:, i * num_heads * d : (i + 1) * num_heads * d],
                src=row_tile_view(hbm, first_head, num_heads, row_tiles[i], 1),
            )
    return rows


def store_row_tiles(
    hbm: nl.NkiTensor,  # [heads, S, d]
    first_head: int,
    num_heads: int,
    row_tiles: list[int],
    rows: nl.NkiTensor,  # [128, (row tile, head, d)]
) -> None:
    """The reverse of load_row_tiles."""
    _, num_rows, d = hbm.shape
    tiles = len(row_tiles)
    if tiles * PARTITIONS == num_rows:
        nisa.dma_copy(dst=row_tile_view(hbm, first_head, num_heads, 0, tiles), src=rows)
    else:
        for i in range(tiles):
            nisa.dma_copy(
                dst=row_tile_view(hbm, first_head, num_heads, row_tiles[i], 1),
                src=rows[:, i * num_heads * d : (i + 1) * num_heads * d],
            )


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


def transpose_row_tiles(tiles: RowTiles, num_tiles: int, columns: nl.NkiTensor) -> None:
    """Row tiles as columns [parts * width, num_tiles * 128]: row p of tile t in column t * 128 + p.

    PE transposes as many tiles into one PSUM bank as fit; one copy brings them back to SBUF.
    """
    rows = tiles.rows
    height = tiles.parts * tiles.width
    per_bank = PSUM_BANK_BYTES // (element_bytes(rows.dtype) * PARTITIONS)
    for begin in range(0, num_tiles, per_bank):
        count = min(per_bank, num_tiles - begin)
        bank = nl.ndarray((height, count * PARTITIONS), dtype=rows.dtype, buffer=nl.psum)
        for t in range(count):
            nisa.nc_transpose(
                dst=bank[:, t * PARTITIONS : (t + 1) * PARTITIONS],
                data=tiles.tile(begin + t),
                engine=nisa.engine.tensor,
            )
        nisa.tensor_copy(
            dst=columns[:, begin * PARTITIONS : (begin + count) * PARTITIONS], src=bank
        )


def new_columns(num_tiles: int, d: int, dtype: str) -> list[nl.NkiTensor]:
    """Unwritten columns of row tiles, [<= 128, num_tiles * 128] per 128 features of d."""
    columns: list[nl.NkiTensor] = []
    for first in range(0, d, PARTITIONS):
        shape = (min(PARTITIONS, d - first), num_tiles * PARTITIONS)
        columns.append(nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf))
    return columns


def transpose_features(
    rows: nl.NkiTensor,  # [128, num_tiles * d] SBUF
    num_tiles: int,
    d: int,
    columns: list[nl.NkiTensor],  # from new_columns, result
) -> None:
    """Row tiles as columns, 128 features at a time."""
    for part in range(len(columns)):
        first = part * PARTITIONS
        width = min(PARTITIONS, d - first)
        transpose_row_tiles(RowTiles(rows, d, width, first), num_tiles, columns[part])


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a floating dtype that PE moves."""
    if dtype == nl.float32:
        return 4
    return 2
