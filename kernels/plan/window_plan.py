"""Where the tokens of a sliding window lie in the cache, planned on the host for one call."""

import numpy as np

from ...reference.paging import PAD_SLOT_ID, UNUSED_BLOCK
from ..arrays import Array
from ..device.prefill.window_segments import window_tiles
from ..sizes import PARTITIONS


def window_slots(
    table: Array,  # [blocks] int32, -1 absent
    prior_tokens: int,
    window: int | None,
    block_size: int,
    num_rows: int,
    d: int,
    bytes_per_element: int,
) -> Array | None:
    """Slots [1, tokens] int32 of the tokens before a chunk, as many as its window reaches back.

    -1 where there is no token or its block is absent; None if no row sees cached tokens through a
    window. `bytes_per_element` is that of the chunk's keys.
    """
    if window is None or window == 1:
        return None
    first_tile, _, _ = window_tiles(window, num_rows, d, bytes_per_element, block_size)
    positions = np.arange(prior_tokens + first_tile * PARTITIONS, prior_tokens)
    blocks = table[np.maximum(positions, 0) // block_size]
    exists = (positions >= max(0, prior_tokens - window + 1)) & (blocks != UNUSED_BLOCK)
    slots = np.where(exists, blocks * block_size + positions % block_size, PAD_SLOT_ID)
    return slots.astype(np.int32)[None]


def window_columns(slots: Array | None, prior_tokens: int, block_size: int) -> tuple[Array, ...]:
    """What a pre-transposed K cache needs besides window_slots: blocks and flags of the tokens.

    Blocks [1, tokens / block_size + 1] int32 from the one of the first token on, -1 where none of
    its tokens has a slot; [1, tokens] uint8: which tokens have one. None of them without slots.
    """
    if slots is None:
        return ()
    seen = slots != PAD_SLOT_ID
    offset = (prior_tokens - slots.shape[1]) % block_size
    behind = block_size - offset + -slots.shape[1] % block_size
    padded = np.pad(slots[0], (offset, behind), constant_values=PAD_SLOT_ID)
    blocks = padded.reshape(-1, block_size).max(1) // block_size
    return blocks.astype(np.int32)[None], seen.astype(np.uint8)
