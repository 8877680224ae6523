"""How keys go into a pre-transposed cache: whole blocks and single tokens, planned on the host.

A block of such a cache is d rows of block_size elements. Keys of a block that one call fills are
transposed on chip and stored as rows; those of any other block are stored element by element, in
descriptors of one element, which only few tokens can afford: at most two blocks of a chunk whose
tokens follow each other.
"""

from dataclasses import dataclass

import numpy as np

from ...reference.paging import PAD_SLOT_ID, UNUSED_BLOCK, cdiv
from ..arrays import Array
from ..sizes import PARTITIONS


@dataclass(frozen=True)
class KeyWritePlan:
    """Arrays of the kernel, int32; -1 where there is nothing."""

    tokens: Array  # [tiles, 128]: token of each slot of the whole blocks
    blocks: Array  # [tiles, 128 / block_size]: block of each run of slots
    rest: Array  # [2, (tiles + 1) * 128]: token and slot of the others
    num_rest: Array  # [1, 1]


def key_write_plan(slot_mapping: Array, block_size: int) -> KeyWritePlan:
    """The plan of a call; slots are distinct."""
    tiles = cdiv(len(slot_mapping), PARTITIONS)
    used = np.flatnonzero(slot_mapping != PAD_SLOT_ID)
    order = used[np.argsort(slot_mapping[used], kind="stable")]
    block_of, first, count = np.unique(
        slot_mapping[order] // block_size, return_index=True, return_counts=True
    )
    whole = count == block_size
    starts = first[whole]
    tokens = np.full((tiles, PARTITIONS), -1, np.int32)
    tokens.reshape(-1)[: len(starts) * block_size] = order[
        (starts[:, None] + np.arange(block_size)).ravel()
    ]
    blocks = np.full((tiles, PARTITIONS // block_size), UNUSED_BLOCK, np.int32)
    blocks.reshape(-1)[: len(starts)] = block_of[whole]
    others = order[~np.repeat(whole, count)]
    rest = np.full((2, (tiles + 1) * PARTITIONS), -1, np.int32)
    rest[0, : len(others)] = others
    rest[1, : len(others)] = slot_mapping[others]
    return KeyWritePlan(tokens, blocks, rest, np.array([[len(others)]], np.int32))


def key_write_arguments(
    slot_mapping: Array, block_size: int, k_pre_transposed: bool
) -> tuple[Array, ...]:
    """The plan as the last arguments of a kernel that writes; none for keys in rows."""
    if not k_pre_transposed:
        return ()
    plan = key_write_plan(slot_mapping, block_size)
    return plan.tokens, plan.blocks, plan.rest, plan.num_rest
