"""The one shift of a q_group, from a sample of its scores."""

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..tile_schedule import Q_BLOCK_TILES
from .kv_tiles import KvTiles
from .on_chip import over_partitions, psum_bank, sbuf
from .query_tiles import QueryTiles
from .softmax_base import Softmax

HEADROOM = 16.0
"""Exponent in nats of the largest sampled score. Scores up to 60 above it stay finite with 131072
keys; a row whose largest score is less than 76 below it has a sum of at least exp(-60)."""

LARGEST_SHIFT = 1.0e4
"""Shifts are kept within this: with scores beyond it fp32 has no accurate differences."""


def sampled_blocks(queries: QueryTiles) -> int:
    """q_blocks whose columns the sample needs: the first row tile, every head of it."""
    return -(-queries.group.num_heads // Q_BLOCK_TILES)


def estimate_shift(
    queries: QueryTiles,
    kv: KvTiles,  # of the chunk
    softmax: Softmax,
    ones: nl.NkiTensor,  # [1, 128] fp32
) -> None:
    """Minus the shift, on every partition.

    The sample is all scores of the q_group's first row tile, every head of it, against the keys of
    the same tokens, padding (zero) and later keys included. Other rows may differ: see
    bounded_softmax.py.
    """
    heads = queries.group.num_heads
    key = queries.group.row_tiles[0]
    blocks = sampled_blocks(queries)
    largest = sbuf((PARTITIONS, blocks))
    for block in range(blocks):
        columns = min(Q_BLOCK_TILES, heads - block * Q_BLOCK_TILES) * PARTITIONS
        scores = psum_bank()[:, 0:columns]
        for part, own in enumerate(queries.columns[block]):
            nisa.nc_matmul(
                dst=scores, stationary=kv.keys(key, key + 1, part), moving=own[:, 0:columns],
                accumulate=part > 0,
            )  # fmt: skip
        nisa.tensor_reduce(
            dst=largest[:, block : block + 1], op=nl.maximum, data=softmax.raw_scores(scores, kv),
            axis=1, keepdims=True,
        )  # fmt: skip
    each = largest
    if blocks > 1:
        each = sbuf((PARTITIONS, 1))
        nisa.tensor_reduce(dst=each, op=nl.maximum, data=largest, axis=1, keepdims=True)
    number, shift = sbuf((1, 1)), sbuf((1, 1))
    over_partitions(each, nl.maximum, number)
    nisa.tensor_scalar(
        dst=shift, data=number, op0=nl.multiply, operand0=-softmax.scale, op1=nl.add,
        operand1=HEADROOM,
    )  # fmt: skip
    nisa.tensor_scalar(
        dst=shift, data=shift, op0=nl.minimum, operand0=LARGEST_SHIFT, op1=nl.maximum,
        operand1=-LARGEST_SHIFT,
    )  # fmt: skip
    spread = psum_bank()[:, 0:1]
    nisa.nc_matmul(dst=spread, stationary=ones, moving=shift, accumulate=False)
    nisa.tensor_copy(dst=queries.neg_max[0], src=spread)
