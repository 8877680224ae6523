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
    valid: nl.NkiTensor,  # [128, tiles] uint8: which rows of these tiles are real
) -> nl.NkiTensor:
    """The same row tiles of consecutive heads, [128, heads * tiles * d], padding rows zero."""
    _, num_rows, d = hbm.shape
    tiles = len(row_tiles)
    total = num_heads * tiles
    stage = nl.ndarray((PARTITIONS, total * d), dtype=hbm.dtype, buffer=nl.sbuf)
    if tiles * PARTITIONS == num_rows:
        nisa.dma_copy(
            dst=stage,
            src=hbm.ap(
                [[d, PARTITIONS], [PARTITIONS * d, total], [1, d]], offset=first_head * num_rows * d
            ),
        )
    else:
        for i in range(tiles):
            nisa.dma_copy(
                dst=stage.ap(
                    [[total * d, PARTITIONS], [tiles * d, num_heads], [1, d]], offset=i * d
                ),
                src=hbm.ap(
                    [[d, PARTITIONS], [num_rows * d, num_heads], [1, d]],
                    offset=(first_head * num_rows + row_tiles[i] * PARTITIONS) * d,
                ),
            )
    each_row = valid.ap([[tiles, PARTITIONS], [0, num_heads], [1, tiles], [0, d]])
    return zero_rows(stage, each_row, hbm.dtype)


def store_row_tiles(
    hbm: nl.NkiTensor,  # [heads, S, d]
    first_head: int,
    num_heads: int,
    row_tiles: list[int],
    rows: nl.NkiTensor,  # [128, heads * tiles * d]
    valid: nl.NkiTensor,  # [128, tiles] uint8
) -> None:
    """The reverse of load_row_tiles; padding rows are stored as zero."""
    _, num_rows, d = hbm.shape
    tiles = len(row_tiles)
    total = num_heads * tiles
    each_row = valid.ap([[tiles, PARTITIONS], [0, num_heads], [1, tiles], [0, d]])
    result = zero_rows(rows, each_row, hbm.dtype)
    if tiles * PARTITIONS == num_rows:
        nisa.dma_copy(
            dst=hbm.ap(
                [[d, PARTITIONS], [PARTITIONS * d, total], [1, d]], offset=first_head * num_rows * d
            ),
            src=result,
        )
    else:
        for i in range(tiles):
            nisa.dma_copy(
                dst=hbm.ap(
                    [[d, PARTITIONS], [num_rows * d, num_heads], [1, d]],
                    offset=(first_head * num_rows + row_tiles[i] * PARTITIONS) * d,
                ),
                src=result.ap(
                    [[total * d, PARTITIONS], [tiles * d, num_heads], [1, d]], offset=i * d
                ),
            )


def transpose_row_tiles(tiles: RowTiles, num_tiles: int) -> nl.NkiTensor:
    """Row tiles as columns [parts * width, num_tiles * 128]: row p of tile t in column t * 128 + p.

    PE transposes as many tiles into one PSUM bank as fit; one copy brings them back to SBUF.
    """
    rows = tiles.rows
    height = tiles.parts * tiles.width
    columns = nl.ndarray((height, num_tiles * PARTITIONS), dtype=rows.dtype, buffer=nl.sbuf)
    per_bank = PSUM_BANK_BYTES // (element_bytes(rows) * PARTITIONS)
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
    return columns


def transpose_features(
    rows: nl.NkiTensor,  # [128, num_tiles * d] SBUF
    num_tiles: int,
    d: int,
) -> list[nl.NkiTensor]:
    """Row tiles as columns [<= 128, num_tiles * 128], one tile per 128 features of d."""
    columns: list[nl.NkiTensor] = []
    for first in range(0, d, PARTITIONS):
        width = min(PARTITIONS, d - first)
        columns.append(transpose_row_tiles(RowTiles(rows, d, width, first), num_tiles))
    return columns


def element_bytes(tile: nl.NkiTensor) -> int:
    """Bytes of one element of a floating tile that PE moves."""
    if tile.dtype == nl.float32:
        return 4
    return 2
