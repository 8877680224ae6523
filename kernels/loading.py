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


def broadcast_number(number: nl.NkiTensor) -> nl.NkiTensor:
    """A [1, 1] int32 HBM number in fp32 on every partition, [128, 1]."""
    tile = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=number.ap([[0, PARTITIONS], [1, 1]]))
    return tile


def number_register(number: nl.NkiTensor) -> nisa.VirtualRegister:
    """A [1, 1] int32 HBM number in a register, for loop bounds."""
    tile = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=number)
    register = nisa.register_alloc()
    nisa.register_load(register, tile)
    return register


def zero_rows(rows: nl.NkiTensor, valid: nl.NkiTensor) -> nl.NkiTensor:
    """`rows` [128, n] with zero wherever the predicate `valid` (128 x n elements) is 0."""
    kept = nl.ndarray(rows.shape, dtype=rows.dtype, buffer=nl.sbuf)
    nisa.select_reduce(dst=kept, predicate=valid, on_true=rows, on_false=0.0)
    return kept


def load_row_tiles(
    hbm: nl.NkiTensor,  # [..., d], contiguous rows
    first_row: int,
    num_groups: int,
    valid: nl.NkiTensor,  # [128, tiles] uint8: which rows of a group are real
) -> nl.NkiTensor:
    """num_groups * tiles row tiles that follow each other in HBM, [128, groups * tiles * d]."""
    d = hbm.shape[-1]
    tiles = valid.shape[1]
    total = num_groups * tiles
    stage = nl.ndarray((PARTITIONS, total * d), dtype=hbm.dtype, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=stage,
        src=hbm.ap([[d, PARTITIONS], [PARTITIONS * d, total], [1, d]], offset=first_row * d),
    )
    each_row = valid.ap([[tiles, PARTITIONS], [0, num_groups], [1, tiles], [0, d]])
    return zero_rows(stage, each_row)


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


def element_bytes(tile: nl.NkiTensor) -> int:
    """Bytes of one element of a floating tile that PE moves."""
    if tile.dtype == nl.float32:
        return 4
    return 2
