"""How tokens go into the paged cache: runs of them and single ones, planned on the host per call.

The tokens of a chunk mostly follow each other in their blocks. A *run* is `run` tokens of one KV
head that fill an aligned piece of a block; the cache seen as rows of `run` tokens takes it in one
descriptor. Runs of the chunk begin at its token `first` and follow each other without a gap; what
is before, behind and between them is stored by itself. Any other mapping has single tokens only.

All indices of a call are one int32 array [128, columns], whose shape follows from the call's
shapes and from `run` alone: at most three programs for each shape.
"""

from dataclasses import dataclass

import numpy as np

from ...reference.paging import PAD_SLOT_ID, cdiv
from ..arrays import Array
from ..sizes import EDGE_BLOCKS, PARTITIONS, column_parts, num_runs, single_tokens

RUN_BYTES = 4096
"""Most bytes of a run, which lies on one partition of SBUF on its way."""


@dataclass(frozen=True)
class CacheWrites:
    """The indices of a call; -1 where there is nothing.

    Column 0 holds `first`. Then two columns for each 128 runs, all of a KV head before those of the
    next one: row of the cache, KV head. Then for each 128 pairs of a token and a KV head three,
    where the cache has tokens in rows: row of the chunk [KV * T, d], row of the cache, KV head;
    without runs these are all rows of the chunk in order.

    A pre-transposed cache is one of rows [d / parts * block_size], a part of a block of a head
    each, and its runs are whole blocks, part by part; the chunk has rows [KV * T * parts, d /
    parts]. For each 128 parts of blocks that are changed: row of the cache, KV head, then with runs
    the row of the chunk for each place of the block, else row of the chunk, place.
    """

    indices: Array
    run: int
    """Tokens of a run; 0: every token by itself."""


def write_arguments(
    slots: Array, k: Array, value_dim: int, block_size: int, k_pre_transposed: bool
) -> tuple[tuple[Array, int], tuple[Array, int] | tuple[()]]:
    """The indices and `run` for what lies in rows of keys and values [KV, T, d], and those for
    pre-transposed keys.
    """
    num_kv_heads, _, d = k.shape
    run = run_tokens(block_size, max(d, value_dim) * k.itemsize)
    rows = row_writes(slots, num_kv_heads, block_size, run)
    if not k_pre_transposed:
        return (rows.indices, rows.run), ()
    parts = column_parts(d, block_size, k.itemsize)
    columns = column_writes(slots, num_kv_heads, block_size, parts)
    return (rows.indices, rows.run), (columns.indices, columns.run)


def run_tokens(block_size: int, token_bytes: int) -> int:
    """Tokens of a run, for one token of a KV head in so many bytes."""
    while block_size * token_bytes > RUN_BYTES:
        block_size //= 2
    return block_size


def row_writes(slots: Array, num_kv_heads: int, block_size: int, run: int) -> CacheWrites:
    """Of a cache [num_blocks, KV, block_size, d]; slots [T] are distinct or -1."""
    total = len(slots)
    first, starts = _runs(slots, run)
    alone = _left(slots, first, starts, run)
    # Beside runs a single token is gathered and scattered, without them it is scattered only.
    room = single_tokens(total, run)
    scatters = sum(cdiv(num_kv_heads * each, PARTITIONS) for each in (len(starts), room))
    few = total <= len(starts) + 2 * room or cdiv(num_kv_heads * total, PARTITIONS) <= scatters
    if few or len(alone) > room:
        run, first, alone = 0, 0, np.arange(total)
    room = single_tokens(total, run)
    columns = [np.full((PARTITIONS, 1), first)]
    if run:
        columns.append(_run_table(starts, num_kv_heads, block_size, run))
    heads = np.arange(num_kv_heads)[:, None]
    rows = _first_row(slots[alone], num_kv_heads, block_size) + heads * block_size
    rows = np.where(slots[alone] == PAD_SLOT_ID, -1, rows)
    pairs = np.broadcast_arrays(heads * total + alone, rows, heads)
    columns.append(_in_tiles([pair.ravel() for pair in pairs], (0, -1, 0), room * num_kv_heads))
    return CacheWrites(_int32(columns), run)


def column_writes(slots: Array, num_kv_heads: int, block_size: int, parts: int) -> CacheWrites:
    """Of a pre-transposed cache [num_blocks, KV, d, block_size]; slots [T] are distinct or -1."""
    total = len(slots)
    first, starts = _runs(slots, block_size)
    alone = _left(slots, first, starts, block_size)
    blocks, which = np.unique(slots[alone] // block_size, return_inverse=True)
    if total <= EDGE_BLOCKS or len(blocks) > EDGE_BLOCKS:
        nothing = np.zeros((PARTITIONS, 1))
        return CacheWrites(_int32([nothing, _ranked(slots, num_kv_heads, block_size, parts)]), 0)
    head, part = np.arange(num_kv_heads)[:, None], np.arange(parts)
    rows = (blocks[:, None, None] * num_kv_heads + head) * parts + part
    sources = np.full((*rows.shape, block_size), -1)
    sources[which, ..., slots[alone] % block_size] = (
        head * total + alone[:, None, None]
    ) * parts + part
    heads = np.broadcast_to(head, rows.shape)
    listed = [rows.ravel(), heads.ravel(), *sources.reshape(-1, block_size).T]
    room = EDGE_BLOCKS * num_kv_heads * parts
    columns = [
        np.full((PARTITIONS, 1), first),
        _run_table(starts, num_kv_heads, block_size, block_size, parts),
        _in_tiles(listed, (-1, 0, *[-1] * block_size), room),
    ]
    return CacheWrites(_int32(columns), block_size)


def _runs(slots: Array, run: int) -> tuple[int, Array]:
    """Token of the first run, and the slots [runs] at which runs begin; -1 where there is none."""
    used = np.flatnonzero(slots != PAD_SLOT_ID)
    first = int(used[0] - slots[used[0]]) % run if used.size else 0
    count = num_runs(len(slots), run)
    pieces = slots[first : first + count * run].reshape(count, run)
    whole = (pieces == pieces[:, :1] + np.arange(run)).all(1) & (pieces[:, 0] % run == 0)
    return first, np.where(whole, pieces[:, 0], PAD_SLOT_ID)


def _left(slots: Array, first: int, starts: Array, run: int) -> Array:
    """Tokens with a slot that are in no run."""
    left = slots != PAD_SLOT_ID
    left[first : first + len(starts) * run] &= np.repeat(starts == PAD_SLOT_ID, run)
    return np.flatnonzero(left)


def _ranks(blocks: Array) -> Array:
    """How many earlier tokens each one has in its block."""
    order = np.argsort(blocks, kind="stable")
    begins = np.flatnonzero(np.diff(blocks[order], prepend=-1))
    rank = np.empty(len(blocks), np.int64)
    rank[order] = np.arange(len(blocks)) - np.repeat(begins, np.diff(begins, append=len(blocks)))
    return rank


def _ranked(slots: Array, num_kv_heads: int, block_size: int, parts: int) -> Array:
    """Single tokens of a pre-transposed cache: no 128 pairs name a block of a head twice.

    A block is read, changed and stored again, so that of two tokens of it one waits for the other.
    """
    used = np.flatnonzero(slots != PAD_SLOT_ID)
    rank = _ranks(slots[used] // block_size)
    head, part = np.arange(num_kv_heads)[:, None, None], np.arange(parts)
    pieces = []
    for tokens in [used[rank == each] for each in range(int(rank.max(initial=0)) + 1)]:
        blocks, places = np.divmod(slots[tokens][:, None], block_size)
        pairs = np.broadcast_arrays(
            (blocks * num_kv_heads + head) * parts + part, head,
            (tokens[:, None] + head * len(slots)) * parts + part, places,
        )  # fmt: skip
        pieces.append(_in_tiles([pair.ravel() for pair in pairs], (-1, 0, 0, 0), 0))
    room = cdiv(len(slots) * num_kv_heads * parts, PARTITIONS)
    if sum(piece.shape[1] for piece in pieces) > 4 * room:
        room += block_size
    listed = np.concatenate(pieces, 1)
    nothing = np.tile([-1, 0, 0, 0], room - listed.shape[1] // 4)
    return np.concatenate([listed, np.broadcast_to(nothing, (PARTITIONS, len(nothing)))], 1)


def _first_row(slots: Array, num_kv_heads: int, block_size: int) -> Array:
    """Row of KV head 0 in a cache seen as rows of one token."""
    blocks, places = np.divmod(slots.astype(np.int64), block_size)
    return blocks * (num_kv_heads * block_size) + places


def _run_table(
    starts: Array, num_kv_heads: int, block_size: int, run: int, parts: int = 1
) -> Array:
    """Rows of the cache and KV heads of the runs, part by part and head by head."""
    head, part = np.arange(num_kv_heads)[:, None], np.arange(parts)[:, None, None]
    row = _first_row(starts, num_kv_heads, block_size) // run + head * (block_size // run)
    rows = np.where(starts == PAD_SLOT_ID, -1, row * parts + part)
    return _in_tiles([rows.ravel(), np.broadcast_to(head, rows.shape).ravel()], (-1, 0), 0)


def _in_tiles(lists: list[Array], nothing: tuple[int, ...], room: int) -> Array:
    """Lists of one length as tiles of 128 entries, [128, (tile, list)]; at least for `room`."""
    length = len(lists[0])
    tiles = cdiv(max(room, length), PARTITIONS)
    table = np.empty((tiles * PARTITIONS, len(lists)), np.int64)
    table[:] = nothing
    table[:length] = np.stack(lists, 1)
    by_tile = table.reshape(tiles, PARTITIONS, len(lists)).transpose(1, 0, 2)
    return by_tile.reshape(PARTITIONS, tiles * len(lists))


def _int32(columns: list[Array]) -> Array:
    return np.ascontiguousarray(np.concatenate(columns, 1), np.int32)
