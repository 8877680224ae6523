"""The work of a decode step as lists that the kernel reads: made on the host, once for all layers.

A *sequence* is one request on one KV head: its query rows share keys and softmax sums. A cached
token is *common* if every real query of the request sees it. Runs of common tokens that lie in one
block go 128 at a time into *work tiles*, which sequences may share; the part of a tile that is one
sequence's is a *segment*. The few tokens besides, on the causal and on the window's edge, are
gathered in short edge runs and masked one by one. Absent blocks cost nothing.

Segments of a sequence follow each other. Two cores take half of the tiles each and run the same
number of batches; a sequence that both have runs of comes last on either.

Everything is a few passes over whole arrays: lists are filled in the order of tiles and segments
and laid out for the partitions in one copy each.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...reference.paging import cdiv
from ..arrays import Array
from ..sizes import ABSENT, PARTITIONS, PRESENT
from .decode_shape import DecodeShape
from .decode_step import CommonRuns, EdgeRuns, Step, common_runs, edge_runs
from .work_tiles import Runs, Segments, pack_cores

PARTITIONS_OF_ENGINE = 8
"""A DMA engine serves 8 partitions, and a tile that is not full should keep all 16 busy: run i of a
tile is on partition i % 16 * 8 + i // 16."""


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
    heads, requests = step.num_kv_heads, len(step.tables)
    common = common_runs(shape, step)
    edges = edge_runs(shape, step, common)
    counts = np.repeat(common.counts, heads)
    has_work = (common.counts > 0) | (edges.rows >= 0).any(1)
    sequences = np.flatnonzero(np.repeat(has_work, heads))
    pieces = Runs(sequences, np.zeros_like(sequences), counts[sequences])
    may_split = not shape.batch_invariant
    by_core, shared = pack_cores(pieces, shape.tile_segments, step.num_cores, may_split)
    work = _Work(shape, step, by_core, shared, counts)
    indices, masks, flags = work.lists(common, edges)
    return DecodeLists(
        np.full((step.num_cores, 1), work.num_batches, np.int32), indices, masks, flags,
        work.shared_rows(), _empty_sequences(sequences, requests * heads, step.num_cores),
    )  # fmt: skip


class _Work:
    """Segments of all cores, and where they stand in the lists.

    Tiles are numbered through all cores and batches, and so are segments: `position`, of
    which each batch has `room`, some behind its last part.
    """

    def __init__(
        self, shape: DecodeShape, step: Step, by_core: list[Segments], shared: int, counts: Array
    ) -> None:
        self.shape, self.step, self.shared = shape, step, shared
        self.tiles, self.room = shape.batches * shape.tiles, shape.parts * shape.part_segments
        joined = by_core[0]
        if len(by_core) > 1:
            joined = Segments(*(np.concatenate(each) for each in zip(*by_core, strict=True)))
        tile, number, self.place, self.sequence, self.first, self.length = joined
        lengths = [len(own.tile) for own in by_core]
        self.core_ends = [sum(lengths[: core + 1]) - 1 for core in range(len(by_core))]
        """Last segment of each core; that of the core before if it has none."""
        self.last_tile = [int(own.tile[-1]) if len(own.tile) else -1 for own in by_core]
        self.tile = tile + np.repeat(np.arange(len(by_core)) * self.tiles, lengths)
        self.request, self.kv_head = np.divmod(self.sequence, step.num_kv_heads)
        self.ends = self.first + self.length == counts[self.sequence]
        self.goes_on = np.zeros(len(tile), bool)
        self.goes_on[:-1] = self.sequence[1:] == self.sequence[:-1]
        moved = self.goes_on.copy()
        for end, last in zip(self.core_ends, self.last_tile, strict=True):
            if last >= 0:
                self.goes_on[end], moved[end] = False, True
        # What the next tile goes on with is its tile's first or last segment.
        self.number = np.where(moved & (number > 0), shape.tile_segments - 1, number)
        entry, in_batch = np.divmod(self.tile, shape.tiles)
        self.position = entry * self.room + in_batch * shape.tile_segments + self.number
        self.edge_position, self.alone = self.position, np.zeros(0, int)
        if shared >= 0:
            # Tiles without work go on with it: its edges join the last of them.
            is_alone = (self.sequence == shared) & (in_batch < shape.tiles - 1)
            end_position = entry * self.room + (shape.tiles - 1) * shape.tile_segments
            self.edge_position = np.where(is_alone, end_position, self.position)
            self.alone = np.flatnonzero(is_alone & self.ends)

    @property
    def num_batches(self) -> int:
        """Batches with work on any core, at least 1."""
        return max(0, *self.last_tile) // self.shape.tiles + 1

    def lists(self, common: CommonRuns, edges: EdgeRuns) -> tuple[Array, Array, Array]:
        """DecodeLists.indices, masks, flags."""
        shape, step = self.shape, self.step
        rows, tiles, parts, e = shape.rows, shape.tiles, shape.parts, shape.edge_tokens
        entries = step.num_cores * shape.batches
        indices = np.full((entries, PARTITIONS, tiles + 5 * parts), -1, np.int32)
        masks = np.full((entries, PARTITIONS, shape.segments + 2 * tiles), ABSENT, np.float32)
        flags = np.zeros((entries, PARTITIONS, shape.flag_columns), np.uint8)

        _by_engine(indices)[..., :tiles] = self._runs(common)
        np.copyto(_by_engine(masks)[..., : shape.segments], PRESENT, where=self._owned())
        links = self._links().reshape(entries, tiles, 2).swapaxes(1, 2).reshape(entries, 1, -1)
        np.copyto(masks[..., shape.segments :], PRESENT, where=links)

        query, real = self.queries
        height = shape.part_segments * rows
        by_kind = query.reshape(entries, parts, shape.part_segments, 4, rows).transpose(
            0, 2, 4, 3, 1
        )
        indices[:, :height, tiles + parts :] = by_kind.reshape(entries, height, 4 * parts)
        flags[:, :height, :parts] = real.reshape(entries, parts, height).swapaxes(1, 2)

        # Each sequence's edges stand where it ends.
        request, position = self.request[self.ends], self.edge_position[self.ends]
        edge_rows = np.full((entries * self.room, shape.edge_runs), -1, np.int32)
        own, head_rows = edges.rows[request], self.kv_head[self.ends] * (step.block_size // e)
        edge_rows[position] = np.where(own < 0, -1, own + head_rows[:, None])
        height = shape.part_segments * shape.edge_runs
        indices[:, :height, tiles : tiles + parts] = edge_rows.reshape(
            entries, parts, height
        ).swapaxes(1, 2)
        any_sees = np.zeros((entries * self.room, shape.edge_runs, e), np.uint8)
        any_sees[position] = np.any(
            edges.seen[request].reshape(*own.shape, shape.num_queries, e), axis=2
        )
        by_part = any_sees.reshape(entries, parts, height, e).swapaxes(1, 2)
        first = parts + parts * e
        flags[:, :height, parts:first] = by_part.reshape(entries, height, parts * e)
        each = flags[:, :height, first:].reshape(
            entries, shape.part_segments, shape.edge_runs, shape.segments, -1
        )
        entry, segment = np.divmod(position, self.room)
        each[entry, segment % shape.part_segments, :, segment] = edges.seen[request]
        return indices, masks, flags

    def _runs(self, common: CommonRuns) -> Array:
        """Cache row of each run of each tile, -1 where there is none."""
        shape, step = self.shape, self.step
        entries = step.num_cores * shape.batches
        rows = np.full((entries, shape.tiles, PARTITIONS), -1, np.int32)
        before = np.cumsum(self.length) - self.length
        begins = np.cumsum(common.counts) - common.counts
        source = np.repeat(begins[self.request] + self.first - before, self.length)
        count = np.arange(len(source))
        source += count
        found = common.rows[source]
        if step.num_kv_heads > 1:
            heads = self.kv_head * (step.block_size // shape.tokens)
            found += np.repeat(heads.astype(np.int32), self.length)
        place = np.repeat(self.tile * PARTITIONS + self.place - before, self.length)
        place += count
        rows.reshape(-1)[place] = found
        return _spread(rows)

    def _owned(self) -> Array:
        """Which runs of its tile are a segment's."""
        shape = self.shape
        begin, end = np.zeros((2, self.step.num_cores * self.tiles, shape.tile_segments), np.int16)
        begin[self.tile, self.number] = self.place
        end[self.tile, self.number] = self.place + self.length
        run = np.arange(PARTITIONS, dtype=np.int16)
        owned = (run >= begin[..., None]) & (run < end[..., None])
        return _spread(owned.reshape(-1, shape.segments, PARTITIONS))

    def _links(self) -> Array:
        """[tiles, 2]: goes on with the first, with the last segment of the tile before.

        Those behind a core's last one do.
        """
        links = np.zeros((self.step.num_cores * self.tiles, 2), bool)
        linked = self.goes_on.nonzero()[0]
        links[self.tile[linked + 1], (self.number[linked] > 0).astype(int)] = True
        for core, (end, last) in enumerate(zip(self.core_ends, self.last_tile, strict=True)):
            behind = links[core * self.tiles + last + 1 : (core + 1) * self.tiles]
            behind[:, 0] = True
            if last >= 0 and self.number[end] > 0:
                behind[:1] = False, True
        return links

    @cached_property
    def queries(self) -> tuple[Array, Array]:
        """Query row of q, row of out, query and KV head of each position's rows; and if real."""
        shape = self.shape
        row = np.arange(shape.rows)
        positions = self.step.num_cores * shape.batches * self.room
        query = np.full((positions, 4, shape.rows), -1, np.int32)
        real = np.zeros((positions, shape.rows), bool)
        is_real = row % shape.num_queries < self.step.query_lens[self.request][:, None]
        of_q = self.sequence[:, None] * shape.rows + row
        stored = self.ends & (self.sequence != self.shared)
        head = self.kv_head[:, None]
        own = np.empty((len(of_q), 4, shape.rows), np.int32)
        own[:, 0] = np.where(is_real, of_q, -1)
        own[:, 1] = np.where(stored[:, None], of_q, -1)
        own[:, 2] = head * (shape.rows // shape.num_queries) + row // shape.num_queries
        own[:, 3] = head
        query[self.position], real[self.position] = own, is_real
        query[self.edge_position[self.alone]] = own[self.alone]
        query[self.edge_position[self.alone], 1] = -1
        return query, real

    def shared_rows(self) -> Array:
        """DecodeLists.shared."""
        shape = self.shape
        shared = np.full((self.step.num_cores, PARTITIONS, 5), -1, np.int32)
        if self.shared < 0:
            return shared
        query, real = self.queries
        last = np.flatnonzero(self.sequence == self.shared)[0]
        row = np.arange(shape.rows)
        own = shared[:, : shape.rows]
        own[0, :, 0] = self.shared * shape.rows + row
        own[..., 1], own[..., 2] = query[self.position[last], 2], query[self.position[last], 3]
        own[..., 3] = real[self.position[last]]
        for core, (end, last) in enumerate(zip(self.core_ends, self.last_tile, strict=True)):
            is_full = last == self.num_batches * shape.tiles - 1
            shared[core, :, 4] = is_full and self.number[end] > 0
        return shared


def _by_engine(lists: Array) -> Array:
    """[entries, 128, n] as [entries, engine, partition of it, n], to be written."""
    entries, _, n = lists.shape
    return lists.reshape(entries, -1, PARTITIONS_OF_ENGINE, n)


def _spread(runs: Array) -> Array:
    """Runs of tiles [entries, tiles, 128] as [entries, engine, partition of it, tiles]."""
    entries, tiles, _ = runs.shape
    return runs.reshape(entries, tiles, PARTITIONS_OF_ENGINE, -1).transpose(0, 3, 2, 1)


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
