"""Slots and block tables of a kernel call: checked on the host, as the kernels read them.

Every failure is a ValueError that names the argument, its value and what is allowed.
"""

import numpy as np

from ..reference.paging import PAD_SLOT_ID, UNUSED_BLOCK, cdiv
from .validation import Array


def check_slots(slot_mapping: Array, k_cache: Array) -> None:
    """Slots are -1 or distinct rows of the cache."""
    num_blocks, _, block_size, _ = k_cache.shape
    num_slots = num_blocks * block_size
    bad = (slot_mapping < PAD_SLOT_ID) | (slot_mapping >= num_slots)
    if bad.any():
        where = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"slot_mapping[{where}]={slot_mapping[where]}: must be -1 or within 0..{num_slots - 1} "
            f"({num_blocks} blocks of block_size={block_size})"
        )
    used = np.sort(slot_mapping[slot_mapping != PAD_SLOT_ID])
    repeated = used[1:][used[1:] == used[:-1]]
    if repeated.size:
        raise ValueError(f"slot_mapping: slot {repeated[0]} occurs twice, slots must be distinct")


def check_padding_slots(slot_mapping: Array, num_tokens: int) -> None:
    """The rows from num_tokens on are not stored."""
    stored = np.flatnonzero(slot_mapping[num_tokens:] != PAD_SLOT_ID)
    if stored.size:
        where = num_tokens + int(stored[0])
        raise ValueError(
            f"slot_mapping[{where}]={slot_mapping[where]}: must be -1 from num_tokens={num_tokens} "
            "on"
        )


def used_blocks(
    name: str,
    tables: Array,
    token_counts: Array,
    k_cache: Array,
    blocks_per_segment: int,
    spare_blocks: int = 0,
) -> Array:
    """Block tables [B, W] cut to the entries that `token_counts` [B] reach, the rest -1.

    The result is padded to whole segments and by `spare_blocks` more. Entries that are reached
    must be -1 or blocks of the cache, and every count must be covered by its table.
    """
    num_blocks, _, block_size, _ = k_cache.shape
    width = tables.shape[1]
    reached = -(-token_counts // block_size)
    if (reached > width).any():
        where = int(np.flatnonzero(reached > width)[0])
        raise ValueError(
            f"{name}: {width} blocks of block_size={block_size} hold {width * block_size} tokens, "
            f"must cover {token_counts[where]}"
        )
    padded_width = max(1, cdiv(width, blocks_per_segment)) * blocks_per_segment
    padded = np.full((len(tables), padded_width + spare_blocks), UNUSED_BLOCK, np.int32)
    most = int(reached.max(initial=0))
    used = padded[:, :most]
    np.copyto(used, tables[:, :most], where=np.arange(most) < reached[:, None])
    if most and not UNUSED_BLOCK <= used.min() <= used.max() < num_blocks:
        bad = (used < UNUSED_BLOCK) | (used >= num_blocks)
        row, column = (int(i[0]) for i in np.nonzero(bad))
        raise ValueError(
            f"{name}[{row}, {column}]={used[row, column]}: must be -1 or within 0..{num_blocks - 1}"
        )
    return padded
