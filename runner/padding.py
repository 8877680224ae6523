"""The padding contract: what the padded inputs of a compiled shape hold, in pure functions.

A step's real tokens are laid into a *bucket*; the compiled tensors have `attention_rows(bucket)`
rows, the next multiple of 128, for a prefill, and exactly the bucket for a decode.

| step | tensor | real part | padding |
|---|---|---|---|
| prefill, n tokens | input_ids [S] | tokens | pad token id |
| | positions [S] | prior .. prior+n-1 | the last real position |
| | slot_mapping [S] | block_id * block_size + offset | -1: nothing is written |
| | block_table [max_blocks] | physical ids | -1: nothing is read |
| decode, b requests | input_ids, positions [B * T] | token and drafts of each request | 0 |
| | slot_mapping [B * T] | | -1 |
| | query_lens [B] | 1 + drafts of the request, at most T | 0 |
| | context_lens [B] | tokens in cache with the new ones | 0 |
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
class Row:
    """Tokens that one request computes in a step: known ones, then drafts."""

    token_ids: Sequence[int]
    prior_tokens: int
    """Tokens in the cache before them; the position of the first."""
    block_ids: Sequence[int]


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
class DecodeInputs:
    """Inputs of one decode batch; B = bucket, T tokens and W blocks per request."""

    bucket: int
    num_queries: int
    input_ids: Int32Array  # [B * T]
    positions: Int32Array  # [B * T]
    slot_mapping: Int32Array  # [B * T]
    query_lens: Int32Array  # [B]
    context_lens: Int32Array  # [B]
    block_tables: Int32Array  # [B, W]


def padded(values: Sequence[int], size: int, fill: int) -> Int32Array:
    """`values`, then `fill` up to `size` entries. ValueError when they do not fit."""
    if len(values) > size:
        raise ValueError(f"{len(values)} values do not fit a padded size of {size}")
    result = np.full(size, fill, dtype=np.int32)
    result[: len(values)] = values
    return result


def padded_block_table(row: Row, width: int, block_size: int) -> Int32Array:
    """Physical ids of the blocks that hold the row's context, then unused ones up to `width`."""
    num_blocks = num_blocks_for(row.prior_tokens + len(row.token_ids), block_size)
    return padded(row.block_ids[:num_blocks], width, UNUSED_BLOCK)


def slots_of(row: Row, block_size: int) -> list[int]:
    """Slot of each token of the row. IndexError when its blocks end before."""
    positions = range(row.prior_tokens, row.prior_tokens + len(row.token_ids))
    return [slot_of(position, row.block_ids, block_size) for position in positions]


def prefill_inputs(row: Row, *, bucket: int, width: int, block_size: int) -> PrefillInputs:
    """Lay a chunk into `bucket` and its block table into `width` entries.

    A row without tokens gives inputs of padding only, which is what warm-up runs. ValueError when
    the chunk exceeds the bucket or its blocks exceed the width.
    """
    num_tokens = len(row.token_ids)
    if num_tokens > bucket:
        raise ValueError(f"num_tokens={num_tokens} exceeds bucket={bucket}")
    rows = attention_rows(bucket)
    positions = range(row.prior_tokens, row.prior_tokens + num_tokens)
    return PrefillInputs(
        bucket=bucket,
        num_tokens=num_tokens,
        prior_tokens=row.prior_tokens,
        input_ids=padded(row.token_ids, rows, PAD_TOKEN_ID),
        positions=padded(positions, rows, max(positions.stop - 1, 0)),
        slot_mapping=padded(slots_of(row, block_size), rows, PAD_SLOT_ID),
        block_table=padded_block_table(row, width, block_size),
    )


def decode_inputs(
    rows: Sequence[Row], *, bucket: int, num_queries: int, width: int, block_size: int
) -> DecodeInputs:
    """Lay a decode batch into `bucket` rows of `num_queries` tokens and tables of `width` blocks.

    ValueError when the batch exceeds the bucket, a row `num_queries` or a context the width.
    """
    if len(rows) > bucket:
        raise ValueError(f"num_seqs={len(rows)} exceeds bucket={bucket}")
    shape = (bucket, num_queries)
    input_ids = np.full(shape, PAD_TOKEN_ID, np.int32)
    positions = np.zeros(shape, np.int32)
    slot_mapping = np.full(shape, PAD_SLOT_ID, np.int32)
    block_tables = np.full((bucket, width), UNUSED_BLOCK, np.int32)
    for index, row in enumerate(rows):
        input_ids[index] = padded(row.token_ids, num_queries, PAD_TOKEN_ID)
        end = row.prior_tokens + len(row.token_ids)
        positions[index] = padded(range(row.prior_tokens, end), num_queries, 0)
        slot_mapping[index] = padded(slots_of(row, block_size), num_queries, PAD_SLOT_ID)
        block_tables[index] = padded_block_table(row, width, block_size)
    contexts = [row.prior_tokens + len(row.token_ids) for row in rows]
    return DecodeInputs(
        bucket=bucket,
        num_queries=num_queries,
        input_ids=input_ids.reshape(-1),
        positions=positions.reshape(-1),
        slot_mapping=slot_mapping.reshape(-1),
        query_lens=padded([len(row.token_ids) for row in rows], bucket, 0),
        context_lens=padded(contexts, bucket, 0),
        block_tables=block_tables,
    )
