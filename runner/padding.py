"""The padding contract: what the padded inputs of a compiled shape hold, in pure functions.

A step's real tokens are laid into a *bucket*; the compiled tensors have `attention_rows(bucket)`
rows, the next multiple of 128, for a prefill, and exactly the bucket for a decode.

| step | tensor | real part | padding |
|---|---|---|---|
| prefill, n tokens | input_ids [S] | tokens | pad token id |
| | positions [S] | prior .. prior+n-1 | the last real position |
| | slot_mapping [S] | block_id * block_size + offset | -1: nothing is written |
| | block_table [max_blocks] | physical ids | -1: nothing is read |
| decode, b requests | input_ids, positions [B] | | 0 |
| | slot_mapping [B] | | -1 |
| | context_lens [B] | tokens in cache with the new one | 0 |
| | block_tables [B, W] | | rows of -1 |

No block is allocated for padding and no result depends on a padded lane. Arrays are int32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..reference.paging import (
    PAD_SLOT_ID,
    PAD_TOKEN_ID,
    UNUSED_BLOCK,
    attention_rows,
    num_blocks_for,
    slot_of,
)

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PrefillInputs:
    """Inputs of one prefill chunk; S = attention_rows(bucket)."""

    bucket: int
    num_tokens: int
    prior_tokens: int
    input_ids: Int32Array  # [S]
    positions: Int32Array  # [S]
    slot_mapping: Int32Array  # [S]
    block_table: Int32Array  # [max_blocks]


@dataclass(frozen=True)
class DecodeRow:
    """One request of a decode batch: its new token is the last of `context_len` known tokens."""

    token_id: int
    context_len: int
    block_ids: Sequence[int]


@dataclass(frozen=True)
class DecodeInputs:
    """Inputs of one decode batch; B = bucket, W blocks per request."""

    bucket: int
    num_seqs: int
    input_ids: Int32Array  # [B]
    positions: Int32Array  # [B]
    slot_mapping: Int32Array  # [B]
    context_lens: Int32Array  # [B]
    block_tables: Int32Array  # [B, W]


def padded(values: Sequence[int], size: int, fill: int) -> Int32Array:
    """`values`, then `fill` up to `size` entries. ValueError when they do not fit."""
    if len(values) > size:
        raise ValueError(f"{len(values)} values do not fit a padded size of {size}")
    result = np.full(size, fill, dtype=np.int32)
    result[: len(values)] = values
    return result


def prefill_positions(prior_tokens: int, num_tokens: int, rows: int) -> Int32Array:
    """Positions of a chunk; padding repeats the last real one (0 where there is none)."""
    last = max(prior_tokens + num_tokens - 1, 0)
    return padded(range(prior_tokens, prior_tokens + num_tokens), rows, last)


def padded_slots(
    positions: Sequence[int], block_ids: Sequence[int], block_size: int, rows: int
) -> Int32Array:
    """Slots of one request's `positions`; padding is written nowhere."""
    slots = [slot_of(position, block_ids, block_size) for position in positions]
    return padded(slots, rows, PAD_SLOT_ID)


def padded_block_table(block_ids: Sequence[int], width: int) -> Int32Array:
    """Physical block ids, then unused entries up to `width` blocks."""
    return padded(block_ids, width, UNUSED_BLOCK)


def prefill_inputs(
    token_ids: Sequence[int],
    prior_tokens: int,
    block_ids: Sequence[int],
    *,
    bucket: int,
    max_blocks: int,
    block_size: int,
) -> PrefillInputs:
    """Lay a chunk's `token_ids`, at positions `prior_tokens` and on, into `bucket`.

    An empty chunk gives inputs of padding only, which is what warm-up runs. ValueError when the
    chunk exceeds the bucket or the request's blocks exceed `max_blocks`.
    """
    num_tokens = len(token_ids)
    if num_tokens > bucket:
        raise ValueError(f"num_tokens={num_tokens} exceeds bucket={bucket}")
    rows = attention_rows(bucket)
    real_positions = range(prior_tokens, prior_tokens + num_tokens)
    return PrefillInputs(
        bucket=bucket,
        num_tokens=num_tokens,
        prior_tokens=prior_tokens,
        input_ids=padded(token_ids, rows, PAD_TOKEN_ID),
        positions=prefill_positions(prior_tokens, num_tokens, rows),
        slot_mapping=padded_slots(real_positions, block_ids, block_size, rows),
        block_table=padded_block_table(block_ids, max_blocks),
    )


def decode_inputs(
    requests: Sequence[DecodeRow], *, bucket: int, width: int, block_size: int
) -> DecodeInputs:
    """Lay a decode batch into `bucket` rows and block tables of `width` blocks.

    Only the blocks that hold a request's context enter its table. ValueError when the batch
    exceeds the bucket or a context exceeds the width.
    """
    if len(requests) > bucket:
        raise ValueError(f"num_seqs={len(requests)} exceeds bucket={bucket}")
    positions = [row.context_len - 1 for row in requests]
    slots = [
        slot_of(position, row.block_ids, block_size)
        for position, row in zip(positions, requests, strict=True)
    ]
    block_tables = np.full((bucket, width), UNUSED_BLOCK, dtype=np.int32)
    for table, row in zip(block_tables, requests, strict=False):
        blocks = row.block_ids[: num_blocks_for(row.context_len, block_size)]
        table[:] = padded_block_table(blocks, width)
    return DecodeInputs(
        bucket=bucket,
        num_seqs=len(requests),
        input_ids=padded([row.token_id for row in requests], bucket, PAD_TOKEN_ID),
        positions=padded(positions, bucket, 0),
        slot_mapping=padded(slots, bucket, PAD_SLOT_ID),
        context_lens=padded([row.context_len for row in requests], bucket, 0),
        block_tables=block_tables,
    )
