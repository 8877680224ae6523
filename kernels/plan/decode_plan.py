"""The work of a decode step as lists that the kernel reads: made on the host, once for all layers.

A *sequence* is one request on one KV head: its query rows share keys and softmax sums. A cached
token is *common* if every real query of the request sees it. Runs of common tokens that lie in one
block go 128 at a time into *work tiles*, which sequences may share; the part of a tile that is one
sequence's is a *segment*. The few tokens besides, on the causal and on the window's edge, are
gathered in short edge runs and masked one by one. Absent blocks cost nothing.

Segments of a sequence follow each other. Two cores take half of the tiles each and run the same
number of batches; a sequence that both have runs of comes last on either.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...reference.paging import UNUSED_BLOCK, cdiv
from ..arrays import Array
from ..sizes import ABSENT, PARTITIONS, PRESENT
from .decode_shape import DecodeShape
from .work_tiles import Runs, pack_cores

PARTITION_OF = np.arange(PARTITIONS) % 16 * 8 + np.arange(PARTITIONS) // 16
"""Partition of the i-th run of a tile: a DMA engine serves 8 partitions, and a tile that is not
full should keep all 16 busy."""


@dataclass(frozen=True)
class Step:
    """What a plan is made of."""

    tables: Array  # [B, W] int, -1 or a block of the cache
    context_lens: Array  # [B] int
    query_lens: Array  # [B] int, within 0..T
    window: int | None
    block_size: int
    num_kv_heads: int
    num_cores: int

    @cached_property
    def first_query(self) -> Array:
        """Position of each request's first query."""
        return self.context_lens - self.query_lens

    @cached_property
    def reach(self) -> Array:
        """Tokens that a query sees, itself included, if there are so many."""
        if self.window is None:
            return self.context_lens.astype(np.int64)
        return np.minimum(self.context_lens, self.window).astype(np.int64)

    @cached_property
    def active(self) -> Array:
        """Whether a request has a query."""
        return (self.query_lens > 0) & (self.context_lens > 0)

    def rows(self, request: Array, unit: Array, tokens: int) -> Array:
        """Cache rows of `tokens` tokens, KV head 0; -1 where the block is absent."""
        per_block = self.block_size // tokens
        entry, place = np.divmod(unit, per_block)
        block = self.tables[request, entry].astype(np.int64)
        rows = block * (self.num_kv_heads * per_block) + place
        return np.where(block == UNUSED_BLOCK, -1, rows)


@dataclass(frozen=True)
class DecodeLists:
    """Arrays of the kernel: C cores, L batches each, N segments of W tiles, G parts of a batch.

    Partition `segment * rows + row` of a part is a query row.
    """

    num_batches: Array
    """[C, 1] int32: the same for all cores, at least 1."""
    indices: Array
    """[C * L, 128, W + 5 G] int32: run of each tile, edge run of each part; then per part query
    row of q, row of out after the sequence's last segment, query head, KV head; -1: nothing."""
    masks: Array
    """[C * L, 128, N + 2 W] fp32: PRESENT for a partition with a run of the segment, else ABSENT;
    per tile PRESENT where its first segment goes on with the first segment of the tile before;
    and the same for the last segment of the tile before."""
    flags: Array
    """[C * L, 128, G + G * e + N * T * e] uint8: real query rows; edge tokens that any query sees;
    which query sees which."""
    shared: Array
    """[C, 128, 5] int32: row of out, query head, KV head and real rows of the sequence that both
    cores end with; out is -1 if there is none, and on core 1. Then whether the core's part of it
    is in the last segment of the last tile, not in the first."""
    empty: Array
    """[C, 128 n] int32: sequences that see nothing, whose output is zero."""

    def arrays(self) -> tuple[Array, ...]:
        """The arrays in the order of the kernel's arguments."""
        return self.num_batches, self.indices, self.masks, self.flags, self.shared, self.empty


def plan_lists(shape: DecodeShape, step: Step) -> DecodeLists:
    """The work of a step. Lengths must be covered by the tables."""
    cores, heads, requests = step.num_cores, step.num_kv_heads, len(step.tables)
    size = shape.tokens
    first_run = -(-np.maximum(0, step.context_lens - step.reach) // size)
    end_run = np.maximum(first_run, (step.first_query + 1) // size)
    run_request, run_unit = _ranges(first_run, np.where(step.active, end_run, first_run))
    run_rows = step.rows(run_request, run_unit, size)
    run_request, run_rows = run_request[run_rows >= 0], run_rows[run_rows >= 0]
    num_runs = np.bincount(run_request, minlength=requests)
    edges = _Edges(shape, step, first_run, end_run)

    sequences = np.flatnonzero(np.repeat((num_runs > 0) | (edges.counts > 0), heads))
    counts = np.repeat(num_runs, heads)
    pieces = [Runs(c, 0, counts[c]) for c in sequences.tolist()]
    may_share = not shape.batch_invariant
    by_core, shared = pack_cores(pieces, shape.tile_segments, cores, may_share)
    table = np.array(
        [
            (core, s.tile, s.number, s.place, *s.runs)
            for core, own in enumerate(by_core)
            for s in own
        ],
        np.int64,
    ).reshape(-1, 7)
    core, tile, number, place, sequence, first, length = table.T
    batch, tile = np.divmod(tile, shape.tiles)
    entry = core * shape.batches + batch
    goes_on = np.append((core[1:] == core[:-1]) & (sequence[1:] == sequence[:-1]), False)
    from_before = np.append(False, goes_on[:-1]) if len(core) else goes_on
    last_of_core = np.append(core[1:] != core[:-1], True) if len(core) else goes_on
    # What the next tile goes on with is its tile's first or last segment.
    number = np.where((goes_on | last_of_core) & (number > 0), shape.tile_segments - 1, number)
    segment = tile * shape.tile_segments + number
    used = int(batch.max()) + 1 if len(batch) else 1

    entries, parts = cores * shape.batches, shape.parts
    indices = np.full((entries, PARTITIONS, shape.tiles + 5 * parts), -1, np.int32)
    masks = np.full((entries, PARTITIONS, shape.segments + 2 * shape.tiles), ABSENT, np.float32)
    flags = np.zeros((entries, PARTITIONS, shape.flag_columns), np.uint8)
    which, offset = _ranges(np.zeros_like(length), length)
    partition = PARTITION_OF[place[which] + offset]
    starts = np.concatenate([[0], np.cumsum(num_runs)])
    of_request, kv_head = np.divmod(sequence, heads)
    rows = run_rows[(starts[of_request] + first)[which] + offset]
    rows = rows + kv_head[which] * (step.block_size // size)
    indices[entry[which], partition, tile[which]] = rows
    masks[entry[which], partition, segment[which]] = PRESENT
    _link_tiles(shape, masks, batch * shape.tiles + tile, core, number, from_before)
    part, inner = np.divmod(segment, shape.part_segments)
    row = np.arange(shape.rows)
    at = entry[:, None], inner[:, None] * shape.rows + row
    column = shape.tiles + parts + part[:, None]
    real = (row % shape.num_queries) < step.query_lens[of_request][:, None]
    query_rows = sequence[:, None] * shape.rows + row
    ends = first + length == counts[sequence]
    stored = (ends & (sequence != shared))[:, None]
    query_head = kv_head[:, None] * (shape.rows // shape.num_queries) + row // shape.num_queries
    indices[(*at, column)] = np.where(real, query_rows, -1)
    indices[(*at, column + parts)] = np.where(stored, query_rows, -1)
    indices[(*at, column + 2 * parts)] = query_head
    indices[(*at, column + 3 * parts)] = kv_head[:, None]
    flags[(*at, np.broadcast_to(part[:, None], real.shape))] = real
    # Tiles without work go on with the shared sequence: its edges join the last of them.
    alone = (sequence == shared) & (tile < shape.tiles - 1)
    edge_segment = np.where(alone, (shape.tiles - 1) * shape.tile_segments, segment)
    edges.place(indices, flags, entry[ends], edge_segment[ends], sequence[ends])
    for each in np.flatnonzero(alone & ends):
        own_part, within = divmod(int(edge_segment[each]), shape.part_segments)
        own_rows = slice(within * shape.rows, (within + 1) * shape.rows)
        columns = indices[entry[each], own_rows, shape.tiles + parts + own_part :: parts]
        columns[:, 0] = np.where(real[each], query_rows[each], -1)
        columns[:, 2], columns[:, 3] = query_head[each], kv_head[each]

    shared_rows = np.full((cores, PARTITIONS, 5), -1, np.int32)
    if shared >= 0:
        last = np.flatnonzero(sequence == shared)[0]
        own = shared_rows[:, : shape.rows]
        own[..., 1], own[..., 2], own[..., 3] = query_head[last], kv_head[last], real[last]
        own[0, :, 0] = query_rows[last]
        full = batch * shape.tiles + tile == used * shape.tiles - 1
        for each in np.flatnonzero(last_of_core):
            shared_rows[core[each], :, 4] = full[each] and number[each] > 0
    return DecodeLists(
        np.full((cores, 1), used, np.int32), indices, masks, flags, shared_rows,
        _empty_sequences(sequences, requests * heads, cores),
    )  # fmt: skip


def _link_tiles(
    shape: DecodeShape, masks: Array, place: Array, core: Array, number: Array, from_before: Array
) -> None:
    """Enter which tiles go on with the one before; those behind a core's last one do."""
    by_core = masks.reshape(-1, shape.batches, PARTITIONS, masks.shape[2])

    def link(core: Array, place: Array, number: Array) -> None:
        batch, tile = np.divmod(place, shape.tiles)
        by_core[core, batch, :, shape.segments + tile + shape.tiles * (number > 0)] = PRESENT

    linked = np.flatnonzero(from_before)
    link(core[linked], place[linked], number[linked - 1])
    for each in range(len(by_core)):
        own = np.flatnonzero(core == each)[-1:]
        end = place[own[0]] + 1 if len(own) else 0
        behind = np.arange(end, shape.batches * shape.tiles)
        numbers = np.zeros_like(behind)
        numbers[:1] = number[own] if len(own) else 0
        link(np.full_like(behind, each), behind, numbers)


class _Edges:
    """The edge runs of all requests."""

    def __init__(self, shape: DecodeShape, step: Step, first_run: Array, end_run: Array) -> None:
        e, per_run = shape.edge_tokens, shape.tokens // shape.edge_tokens
        self.shape, self.step = shape, step
        seen_from = np.maximum(0, step.first_query - step.reach + 1)
        end = -(-step.context_lens // e)
        left_end = np.minimum(end, first_run * per_run)
        left = _ranges(seen_from // e, np.where(step.active, left_end, 0))
        right = _ranges(end_run * per_run, np.where(step.active, end, 0))
        request = np.concatenate([left[0], right[0]])
        unit = np.concatenate([left[1], right[1]])
        rows = step.rows(request, unit, e)
        queries = step.first_query[request][:, None] + np.arange(shape.num_queries)
        positions = (unit[:, None] * e + np.arange(e))[:, None]
        seen = (positions <= queries[..., None]) & (
            positions > queries[..., None] - step.reach[request][:, None, None]
        )
        seen &= (queries < step.context_lens[request][:, None])[..., None]
        kept = (rows >= 0) & seen.any((1, 2))
        order = np.argsort(request[kept], kind="stable")
        self.rows, self.seen = rows[kept][order], seen[kept][order]
        self.counts = np.bincount(request[kept], minlength=len(step.tables))
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])

    def place(
        self, indices: Array, flags: Array, entry: Array, segment: Array, sequence: Array
    ) -> None:
        """Enter those of sequences that end in the given segments."""
        shape, step = self.shape, self.step
        e, parts = shape.edge_tokens, shape.parts
        request, kv_head = np.divmod(sequence, step.num_kv_heads)
        which, offset = _ranges(np.zeros_like(request), self.counts[request])
        of_edge = self.starts[request][which] + offset
        part, inner = np.divmod(segment[which], shape.part_segments)
        at = entry[which], inner * shape.edge_runs + offset
        rows = self.rows[of_edge] + kv_head[which] * (step.block_size // e)
        indices[(*at, shape.tiles + part)] = rows
        seen = self.seen[of_edge]
        at = at[0][:, None], at[1][:, None]
        any_row = parts + part[:, None] * e + np.arange(e)
        flags[(*at, any_row)] = seen.any(1)
        width = shape.num_queries * e
        each = parts + parts * e + segment[which][:, None] * width + np.arange(width)
        flags[(*at, each)] = seen.reshape(len(seen), width)


def _ranges(first: Array, end: Array) -> tuple[Array, Array]:
    """Which range, and number, of all numbers of the ranges first .. end - 1."""
    lengths = np.maximum(0, end - first)
    which = np.repeat(np.arange(len(lengths)), lengths)
    before = np.cumsum(lengths) - lengths
    return which, np.arange(len(which)) - (before - first)[which]


def _empty_sequences(used: Array, num_sequences: int, cores: int) -> Array:
    """Sequences that see nothing, spread over the cores."""
    empty = np.ones(num_sequences, bool)
    empty[used] = False
    numbers = np.flatnonzero(empty)
    room = cdiv(cdiv(num_sequences, cores), PARTITIONS) * PARTITIONS
    result = np.full((cores, room), -1, np.int32)
    for core in range(cores):
        own = numbers[core::cores]
        result[core, : len(own)] = own
    return result
