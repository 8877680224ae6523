"""The work of one paged_decode call as lists that the kernel reads: made on the host, per step.

A *chain* is one request on `heads` KV heads: its `rows` query rows share keys and softmax sums. A
cached token is *common* if every row of the chain sees it. Runs of `tokens` common tokens that
lie in one block go 128 at a time into *slots*; the at most a few tokens besides, on the causal and
on the window's edge, are the chain's *edge* tokens, gathered one by one and masked row by row. So
no unused row of the cache is ever read, absent blocks cost nothing, and a full slot needs no mask.

Slots follow each other chain by chain. Two cores take half of them each; a chain that both have
slots of comes last on either, so that they end with its two partial sums. `slots` of them make a
group, `groups` a trip of the kernel's loop.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ...reference.paging import cdiv
from ..softmax import MASKED
from ..tile_schedule import PARTITIONS
from ..validation import Array
from .chains import Chains
from .shape import DecodeShape

PARTITION_OF = np.arange(PARTITIONS) % 16 * 8 + np.arange(PARTITIONS) // 16
"""Partition of the i-th run of a slot: a DMA engine serves 8 partitions, and a slot that is not
full should keep all 16 busy."""


@dataclass(frozen=True)
class DecodePlan:
    """Arrays of the kernel. C cores, L = trips (one more to prefetch if there are several)."""

    shape: DecodeShape
    num_trips: Array
    """[C, 2] int32: trips with work, the first always; whether there is a second."""
    gather_rows: Array
    """[C * L, groups, 128, slots + edge_tiles] int32: run of each slot, token of each edge tile."""
    chains: Array
    """[C * L, groups, 2 * slots] int32: chain and head group of each slot."""
    absent: Array
    """[C * L, groups, 128 * slots] bf16: 0, or MASKED for a partition without a run."""
    edge_seen: Array
    """[C * L, groups, 128, edge_tiles * slots * T] uint8: which query sees the edge token."""
    begins: Array
    """[C * L, groups, slots] fp32: 0, or MASKED where a chain begins."""
    out_rows: Array
    """[C * L, groups, slots * rows] int32: where a chain's result goes after its last slot."""
    real_rows: Array
    """[C * L, groups, slots * rows] uint8: rows of real queries."""
    shared_chain: Array
    """[C, 1, 2] int32: the chain that both cores have slots of, any if there is none."""
    shared_out_rows: Array
    """[C, 1, rows] int32: where core 0 stores the shared chain's result."""
    shared_real_rows: Array
    """[C, 1, rows] uint8."""
    empty_chains: Array
    """[C, 128 * n] int32: chains without slots, whose output is zero."""
    key_blocks: Array | None
    """[C * L, groups, slots * (n + edge_runs)] int32: the n blocks of each slot, counted per KV
    head, then the runs of its edge tokens, in units of `tokens` elements; -1 where absent. This
    and the next with a pre-transposed K cache only."""
    present: Array | None
    """[C * L, groups, 128 * (slots + edge_tiles)] uint8: whether a partition has a run or token."""

    def key_arrays(self) -> tuple[Array, ...]:
        """The arrays for a pre-transposed K cache, in the order of the kernel's arguments."""
        if self.key_blocks is None or self.present is None:
            return ()
        return self.key_blocks, self.present

    def arrays(self) -> tuple[Array, ...]:
        """The arrays in the order of the kernel's arguments."""
        return (
            self.num_trips, self.gather_rows, self.chains, self.absent, self.edge_seen,
            self.begins, self.out_rows, self.real_rows, self.shared_chain, self.shared_out_rows,
            self.shared_real_rows, self.empty_chains,
        )  # fmt: skip


class _Layout:
    """Puts the slots of all chains into trips and groups."""

    def __init__(
        self,
        shape: DecodeShape,
        chains: Chains,
        query_lens: Array,
        num_queries: int,
        num_groups: int,
        num_cores: int,
    ) -> None:
        self.shape, self.chains, self.num_groups = shape, chains, num_groups
        self.num_queries, self.num_cores = num_queries, num_cores
        self.length = shape.trips + (shape.trips > 1)
        self.slots = shape.groups * shape.slots * self.length
        real = np.arange(num_queries) < query_lens[:, None]
        per_request = np.repeat(real[:, None], shape.rows // num_queries, 1)
        self.real = np.repeat(per_request.reshape(len(query_lens), shape.rows), num_groups, 0)
        """[chains, rows]."""

    def plan(self, block_size: int, transposed_features: int | None) -> DecodePlan:
        """All arrays."""
        shape, chains, cores = self.shape, self.chains, self.num_cores
        every_run = np.concatenate([np.empty((0, PARTITIONS), np.int64), *chains.runs])
        chain_of = np.repeat(np.arange(len(chains.num_slots)), chains.num_slots)
        orders, shared = self._shares(chain_of)
        runs = np.full((cores, self.slots, PARTITIONS), -1, np.int32)
        chain = np.zeros((cores, self.slots), np.int32)
        begins = np.zeros((cores, self.slots), np.float32)
        ends = np.zeros((cores, self.slots), bool)
        last_slot = np.cumsum(chains.num_slots) - 1
        edge_slots: list[tuple[int, int, int]] = []  # core, slot, chain
        for core, order in enumerate(orders):
            n = len(order)
            own = chain_of[order]
            runs[core, :n, PARTITION_OF] = every_run[order].T
            chain[core, :n] = own
            chain[core, n:] = own[-1] if n else 0
            begins[core, :n] = np.where(np.diff(own, prepend=-1) != 0, MASKED, 0)
            is_last = order == last_slot[own]
            ends[core, :n] = is_last & (own != shared)
            edge_slots += [(core, int(i), int(own[i])) for i in np.flatnonzero(is_last)]
        edge_rows, edge_seen, edge_runs = self._edges(edge_slots)
        lead = (cores * self.length, shape.groups)
        rows = chain[..., None] * shape.rows + np.arange(shape.rows)
        out_rows = np.where(ends[..., None], rows, -1).astype(np.int32)
        by_slot = runs.reshape(*lead, shape.slots, PARTITIONS).swapaxes(2, 3)
        key_blocks: Array | None = None
        present: Array | None = None
        if transposed_features is not None:
            per_block = block_size // shape.tokens
            in_slot = PARTITIONS // per_block
            slot_blocks = np.full((cores, self.slots, in_slot), -1, np.int32)
            blocks = (every_run // per_block).reshape(-1, in_slot, per_block).max(2)
            for core, order in enumerate(orders):
                slot_blocks[core, : len(order)] = blocks[order]
            units = edge_runs // per_block * (per_block * transposed_features)
            units = np.where(edge_runs < 0, -1, units + edge_runs % per_block).astype(np.int32)
            key_blocks = np.concatenate([slot_blocks.reshape(*lead, -1), units], axis=2)
            edges = (edge_rows >= 0).swapaxes(2, 3).reshape(*lead, -1)
            present = np.concatenate([(runs >= 0).reshape(*lead, -1), edges], axis=2)
            present = present.astype(np.uint8)
        shared_chain = max(shared, 0)
        shared_rows = np.full((cores, 1, shape.rows), -1, np.int32)
        if shared >= 0:
            shared_rows[0, 0] = shared * shape.rows + np.arange(shape.rows)
        trips = [max(1, cdiv(len(order), shape.groups * shape.slots)) for order in orders]
        return DecodePlan(
            shape,
            np.array([[n, min(n, 2) - 1] for n in trips], np.int32),
            np.concatenate([by_slot, edge_rows], axis=3),
            np.stack([chain, chain % self.num_groups], -1).reshape(*lead, -1).astype(np.int32),
            np.where(runs < 0, MASKED, 0).astype(ml_dtypes.bfloat16).reshape(*lead, -1),
            edge_seen,
            begins.reshape(*lead, -1),
            out_rows.reshape(*lead, -1),
            self.real[chain].astype(np.uint8).reshape(*lead, -1),
            np.tile(
                np.array([[[shared_chain, shared_chain % self.num_groups]]], np.int32),
                (cores, 1, 1),
            ),
            shared_rows,
            np.tile(self.real[shared_chain].astype(np.uint8), (cores, 1, 1)),
            self._empty_chains(),
            key_blocks,
            present,
        )

    def _shares(self, chain_of: Array) -> tuple[list[Array], int]:
        """The slots of each core in its order, and the chain that two cores share or -1."""
        order = np.arange(len(chain_of))
        if self.num_cores == 1:
            return [order], -1
        cut = cdiv(len(order), 2)
        first, second = order[:cut], order[cut:]
        if not len(second) or chain_of[cut - 1] != chain_of[cut]:
            return [first, second], -1
        shared = int(chain_of[cut])
        is_shared = chain_of[second] == shared
        return [first, np.concatenate([second[~is_shared], second[is_shared]])], shared

    def _edges(self, edge_slots: list[tuple[int, int, int]]) -> tuple[Array, Array, Array]:
        """Edge columns of gather_rows, edge_seen, and the runs [.., slots * edge_runs] of edges.

        With edge runs a token's place is that of its run in the order of the slots, otherwise the
        next free one, spread over the partitions.
        """
        shape = self.shape
        lead = (self.num_cores * self.length, shape.groups)
        rows = np.full((*lead, PARTITIONS, shape.edge_tiles), -1, np.int32)
        seen = np.zeros(
            (*lead, PARTITIONS, shape.edge_tiles, shape.slots, self.num_queries), np.uint8
        )
        runs = np.full((*lead, shape.slots * shape.edge_runs), -1, np.int64)
        used = np.zeros(lead, np.int64)
        for core, slot, chain in edge_slots:
            edge_rows, edge_seen = self.chains.edges[chain]
            group, column = divmod(slot, shape.slots)
            trip, group = divmod(group, shape.groups)
            at = core * self.length + trip, group
            places = used[at] + np.arange(len(edge_rows))
            partition, tile = PARTITION_OF[places % PARTITIONS], places // PARTITIONS
            if shape.edge_runs:
                own, run = np.unique(edge_rows // shape.tokens, return_inverse=True)
                first = column * shape.edge_runs
                runs[(*at, first + np.arange(len(own)))] = own
                places = (first + run) * shape.tokens + edge_rows % shape.tokens
                partition, tile = places % PARTITIONS, places // PARTITIONS
            rows[(*at, partition, tile)] = edge_rows
            seen[(*at, partition, tile, column)] = edge_seen
            used[at] += len(edge_rows)
        return rows, seen.reshape(*lead, PARTITIONS, -1), runs

    def _empty_chains(self) -> Array:
        """Chains without slots, spread over the cores."""
        empty = np.flatnonzero(self.chains.num_slots == 0)
        room = cdiv(cdiv(len(self.chains.num_slots), self.num_cores), PARTITIONS) * PARTITIONS
        result = np.full((self.num_cores, room), -1, np.int32)
        for core in range(self.num_cores):
            own = empty[core :: self.num_cores]
            result[core, : len(own)] = own
        return result


def plan_decode(
    shape: DecodeShape,
    block_tables: Array,  # [B, W] int32, -1 or a block of the cache
    context_lens: Array,  # [B] int32
    query_lens: Array,  # [B] int32
    num_queries: int,
    window: int | None,
    block_size: int,
    num_kv_heads: int,
    num_cores: int,
    transposed_features: int | None = None,  # head_dim, if the K cache is pre-transposed
) -> DecodePlan:
    """The work of a call. Lengths must be covered by the tables."""
    num_groups = num_kv_heads // shape.heads
    num_chains = len(block_tables) * num_groups
    chains = Chains(shape, num_chains)
    for request, table in enumerate(block_tables):
        if context_lens[request] and query_lens[request]:
            chains.add_request(
                request * num_groups, num_groups, table, int(context_lens[request]),
                int(query_lens[request]), num_queries, window, block_size, num_kv_heads,
                transposed_features is not None,
            )  # fmt: skip
    layout = _Layout(shape, chains, query_lens, num_queries, num_groups, num_cores)
    return layout.plan(block_size, transposed_features)
