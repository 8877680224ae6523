"""The work of one paged_decode call as lists that the kernel reads: made on the host, per step.

A *chain* is one request on `heads` KV heads: its `rows` query rows share keys and softmax sums. A
cached token is *common* if every row of the chain sees it. Runs of `tokens` common tokens that
lie in one block go 128 at a time into *slots*, which chains may share; the at most a few tokens
besides, on the causal and on the window's edge, are the chain's *edge* tokens, gathered one by one
and masked row by row. So no unused row of the cache is ever read, and absent blocks cost nothing.

Chains follow each other (spans.py). Two cores take half of the slots each; a chain that both have
runs of comes last on either, so that they end with its two partial sums. A group is
`DecodeShape.slots` slots, which is a trip of the kernel's loop.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ...reference.paging import cdiv
from ..arrays import Array
from ..sizes import MASKED, PARTITIONS
from .decode_chains import Chains
from .decode_shape import DecodeShape
from .decode_spans import Runs, pack_cores

PARTITION_OF = np.arange(PARTITIONS) % 16 * 8 + np.arange(PARTITIONS) // 16
"""Partition of the i-th run of a slot: a DMA engine serves 8 partitions, and a slot that is not
full should keep all 16 busy."""


@dataclass(frozen=True)
class DecodePlan:
    """Arrays of the kernel. C cores, L = most groups (two more to prefetch if there are several).

    S slots of a group, N = S * slot_spans of its spans.
    """

    shape: DecodeShape
    num_groups: Array
    """[C, 1] int32: groups with work on either core, the first always: cores whose loops differ in
    trips hang a trn2."""
    gather_rows: Array
    """[C * L, 128, S + edge_tiles] int32: run of each slot, token of each edge tile."""
    chains: Array
    """[C * L, 2 * N] int32: chain and head group of each span."""
    absent: Array
    """[C * L, 128 * N] bf16: 0, or MASKED for a partition without a run of the span."""
    edge_seen: Array
    """[C * L, 128, edge_tiles * N * T] uint8: which query sees the edge token."""
    begins: Array
    """[C * L, 1 + N] fp32: MASKED, since no row goes on in the next one; then 0, or MASKED where a
    chain begins."""
    out_rows: Array
    """[C * L, N * rows] int32: where a chain's result goes after its last span."""
    real_rows: Array
    """[C * L, N * rows] uint8: rows of real queries."""
    shared_chain: Array
    """[C, 1, 2] int32: the chain that both cores have runs of, any if there is none."""
    shared_out_rows: Array
    """[C, 1, rows] int32: where core 0 stores the shared chain's result."""
    shared_real_rows: Array
    """[C, 1, rows] uint8."""
    empty_chains: Array
    """[C, 128 * n] int32: chains that see nothing, whose output is zero."""
    key_blocks: Array | None
    """[C * L, S * n + N * edge_runs] int32: the n blocks of each slot, counted per KV head, then
    the runs of the edge tokens of each span, in units of `tokens` elements; -1 where absent. This
    and the next with a pre-transposed K cache only."""
    present: Array | None
    """[C * L, 128 * (S + edge_tiles)] uint8: whether a partition has a run or token."""

    def key_arrays(self) -> tuple[Array, ...]:
        """The arrays for a pre-transposed K cache, in the order of the kernel's arguments."""
        if self.key_blocks is None or self.present is None:
            return ()
        return self.key_blocks, self.present

    def arrays(self) -> tuple[Array, ...]:
        """The arrays in the order of the kernel's arguments."""
        return (
            self.num_groups, self.gather_rows, self.chains, self.absent, self.edge_seen,
            self.begins, self.out_rows, self.real_rows, self.shared_chain, self.shared_out_rows,
            self.shared_real_rows, self.empty_chains,
        )  # fmt: skip


class _Layout:
    """Puts the spans of all chains into groups."""

    def __init__(
        self,
        shape: DecodeShape,
        chains: Chains,
        query_lens: Array,
        num_queries: int,
        num_groups: int,  # of KV heads
        num_cores: int,
    ) -> None:
        self.shape, self.chains, self.num_groups = shape, chains, num_groups
        self.num_queries, self.num_cores = num_queries, num_cores
        self.length = shape.groups + 2 * (shape.groups > 1)
        real = np.arange(num_queries) < query_lens[:, None]
        per_request = np.repeat(real[:, None], shape.rows // num_queries, 1)
        self.real = np.repeat(per_request.reshape(len(query_lens), shape.rows), num_groups, 0)
        """[chains, rows]."""

    def plan(self, block_size: int, transposed_features: int | None) -> DecodePlan:
        """All arrays."""
        shape, chains, cores = self.shape, self.chains, self.num_cores
        pieces = [Runs(chain, 0, len(runs)) for chain, runs in chains.runs.items()]
        spans_of_core, shared = pack_cores(pieces, shape.slot_spans, cores)
        slots, spans = self.length * shape.slots, self.length * shape.spans
        runs = np.full((cores, slots, PARTITIONS), -1, np.int64)
        absent = np.full((cores, spans, PARTITIONS), MASKED, ml_dtypes.bfloat16)
        chain_of = np.zeros((cores, spans), np.int64)
        begins = np.zeros((cores, spans), np.float32)
        ends = np.zeros((cores, spans), bool)
        edge_spans: list[tuple[int, int, int]] = []  # core, span, chain
        used = np.ones(cores, np.int64)
        for core, own in enumerate(spans_of_core):
            before = -1
            for slot, number, place, (chain, first, length) in own:
                span = slot * shape.slot_spans + number
                taken = chains.runs[chain][first : first + length]
                runs[core, slot, place : place + length] = taken
                absent[core, span, PARTITION_OF[place + np.flatnonzero(taken >= 0)]] = 0
                # Spans without runs belong to the chain before them.
                chain_of[core, span:] = chain
                if chain != before:
                    begins[core, span] = MASKED
                if first + length == len(chains.runs[chain]):
                    edge_spans.append((core, span, chain))
                    ends[core, span] = chain != shared
                before = chain
            if own:
                used[core] = cdiv(own[-1].slot + 1, shape.slots)
        edge_rows, edge_seen, edge_runs = self._edges(edge_spans)
        entries = cores * self.length
        rows = chain_of[..., None] * shape.rows + np.arange(shape.rows)
        out_rows = np.where(ends[..., None], rows, -1).astype(np.int32)
        by_slot = np.empty_like(runs)
        by_slot[..., PARTITION_OF] = runs
        key_blocks: Array | None = None
        present: Array | None = None
        if transposed_features is not None:
            per_block = block_size // shape.tokens
            in_slot = PARTITIONS // per_block
            blocks = (runs // per_block).reshape(entries, -1, in_slot, per_block).max(3)
            units = edge_runs // per_block * (per_block * transposed_features)
            units = np.where(edge_runs < 0, -1, units + edge_runs % per_block)
            key_blocks = np.concatenate([blocks.reshape(entries, -1), units], 1).astype(np.int32)
            edges = (edge_rows >= 0).swapaxes(1, 2).reshape(entries, -1)
            present = np.concatenate([(by_slot >= 0).reshape(entries, -1), edges], axis=1)
            present = present.astype(np.uint8)
        by_slot = by_slot.reshape(entries, shape.slots, PARTITIONS).swapaxes(1, 2)
        shared_chain = max(shared, 0)
        shared_rows = np.full((cores, 1, shape.rows), -1, np.int32)
        if shared >= 0:
            shared_rows[0, 0] = shared * shape.rows + np.arange(shape.rows)
        chain_and_heads = np.stack([chain_of, chain_of % self.num_groups], -1).astype(np.int32)
        shared_heads = np.array([[[shared_chain, shared_chain % self.num_groups]]], np.int32)
        return DecodePlan(
            shape=shape,
            num_groups=np.full((cores, 1), used.max(), np.int32),
            gather_rows=np.concatenate([by_slot.astype(np.int32), edge_rows], axis=2),
            chains=chain_and_heads.reshape(entries, -1),
            absent=absent.reshape(entries, -1),
            edge_seen=edge_seen,
            begins=np.insert(begins.reshape(entries, -1), 0, np.float32(MASKED), 1),
            out_rows=out_rows.reshape(entries, -1),
            real_rows=self.real[chain_of].astype(np.uint8).reshape(entries, -1),
            shared_chain=np.tile(shared_heads, (cores, 1, 1)),
            shared_out_rows=shared_rows,
            shared_real_rows=np.tile(self.real[shared_chain].astype(np.uint8), (cores, 1, 1)),
            empty_chains=self._empty_chains(),
            key_blocks=key_blocks,
            present=present,
        )

    def _edges(self, edge_spans: list[tuple[int, int, int]]) -> tuple[Array, Array, Array]:
        """Edge columns of gather_rows, edge_seen, and the runs [.., N * edge_runs] of edges.

        With edge runs a token's place is that of its run in the order of the spans, otherwise the
        next free one, spread over the partitions.
        """
        shape = self.shape
        entries = self.num_cores * self.length
        rows = np.full((entries, PARTITIONS, shape.edge_tiles), -1, np.int32)
        seen = np.zeros(
            (entries, PARTITIONS, shape.edge_tiles, shape.spans, self.num_queries), np.uint8
        )
        runs = np.full((entries, shape.spans * shape.edge_runs), -1, np.int64)
        used = np.zeros(entries, np.int64)
        for core, span, chain in edge_spans:
            edge_rows, edge_seen = self.chains.edges[chain]
            group, column = divmod(span, shape.spans)
            at = core * self.length + group
            places = used[at] + np.arange(len(edge_rows))
            partition, tile = PARTITION_OF[places % PARTITIONS], places // PARTITIONS
            if shape.edge_runs:
                own, run = np.unique(edge_rows // shape.tokens, return_inverse=True)
                first = column * shape.edge_runs
                runs[at, first + np.arange(len(own))] = own
                places = (first + run) * shape.tokens + edge_rows % shape.tokens
                partition, tile = places % PARTITIONS, places // PARTITIONS
            rows[at, partition, tile] = edge_rows
            seen[at, partition, tile, column] = edge_seen
            used[at] += len(edge_rows)
        return rows, seen.reshape(entries, PARTITIONS, -1), runs

    def _empty_chains(self) -> Array:
        """Chains that see nothing, spread over the cores."""
        num_chains = self.chains.num_chains
        empty = np.setdiff1d(np.arange(num_chains), list(self.chains.runs))
        room = cdiv(cdiv(num_chains, self.num_cores), PARTITIONS) * PARTITIONS
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
