"""The one shift of a share, from a sample of its scores."""

from ...backend import nisa, nl
from ...sizes import MATMUL_COLUMNS, PARTITIONS
from .bounded import BoundedRows
from .share_tiles import BLOCK_TILES

HEADROOM = 16.0
"""Exponent in nats of the largest sampled score. Scores up to 60 above it stay finite with 131072
keys; a row whose largest score is less than 76 below it has a sum of at least exp(-60)."""

LARGEST_SHIFT = 1.0e4
"""Shifts are kept within this: with scores beyond it fp32 has no accurate differences."""


def estimate_shift(
    rows: BoundedRows,
    keys: list[nl.NkiTensor],  # per 128 features the chunk's key columns
    tile: int,  # the share's first row tile
    ones: nl.NkiTensor,  # [1, 128] fp32
) -> None:
    """Minus the shift, on every partition.

    The sample is all scores of the share's first row tile, every head of it, against the keys of
    the same tokens, padding (zero) and later keys included. Other rows may differ: see bounded.py.
    """
    heads = rows.tiles.share.num_heads
    key = tile * PARTITIONS
    blocks = (heads + BLOCK_TILES - 1) // BLOCK_TILES
    largest = nl.ndarray((PARTITIONS, blocks), dtype=nl.float32, buffer=nl.sbuf)
    for block in range(blocks):
        columns = min(BLOCK_TILES, heads - block * BLOCK_TILES) * PARTITIONS
        first = block * MATMUL_COLUMNS
        scores = rows.scores[block % len(rows.scores)][:, 0:columns]
        for part in range(len(keys)):
            columns_of_part, queries = keys[part], rows.tiles.queries[part]
            nisa.nc_matmul(
                dst=scores, stationary=columns_of_part[:, key : key + PARTITIONS],
                moving=queries[:, first : first + columns], accumulate=part > 0,
            )  # fmt: skip
        nisa.tensor_reduce(
            dst=largest[:, block : block + 1], op=nl.maximum, data=scores, axis=1, keepdims=True
        )
    each = largest
    if blocks > 1:
        each = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=each, op=nl.maximum, data=largest, axis=1, keepdims=True)
    number = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
    rows.over_partitions(each, nl.maximum, number)
    shift = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=shift, data=number, op0=nl.multiply, operand0=-rows.scale, op1=nl.add,
        operand1=HEADROOM,
    )  # fmt: skip
    nisa.tensor_scalar(
        dst=shift, data=shift, op0=nl.minimum, operand0=LARGEST_SHIFT, op1=nl.maximum,
        operand1=-LARGEST_SHIFT,
    )  # fmt: skip
    spread = rows.spare(1, PARTITIONS, 0, 1, nl.float32)
    nisa.nc_matmul(dst=spread, stationary=ones, moving=shift, accumulate=False)
    nisa.tensor_copy(dst=rows.neg_shift, src=spread)
