"""The chains of a decode step: the cached tokens that they see, in runs and besides (plan.py)."""

import numpy as np

from ...reference.paging import UNUSED_BLOCK, cdiv
from ..arrays import Array
from .decode_shape import DecodeShape


class Chains:
    """Runs and edge tokens of the chains that see something."""

    def __init__(self, shape: DecodeShape, num_chains: int) -> None:
        self.runs: dict[int, Array] = {}
        """Rows of the runs of each chain."""
        self.edges: dict[int, tuple[Array, Array]] = {}
        """Rows [e] of a chain's edge tokens and who sees them [e, T]."""
        self.num_chains = num_chains
        self.tokens = shape.tokens

    def add_request(
        self,
        first_chain: int,
        num_groups: int,
        table: Array,
        context: int,
        real: int,
        num_queries: int,
        window: int | None,
        block_size: int,
        num_kv_heads: int,
        whole_blocks: bool,
    ) -> None:
        """The chains of a request, one per group of KV heads."""
        tokens, heads = self.tokens, num_kv_heads // num_groups
        first_query, reach = context - real, context if window is None else window
        first_run = cdiv(max(0, context - reach), tokens)
        end_run = max(first_run, (first_query + 1) // tokens)
        units = np.arange(first_run, end_run)
        runs = _cached_rows(table, units, tokens, block_size, num_kv_heads)
        positions = np.concatenate([
            np.arange(max(0, first_query - reach + 1), min(context, first_run * tokens)),
            np.arange(end_run * tokens, context),
        ])  # fmt: skip
        queries = first_query + np.arange(num_queries)
        seen = (positions[:, None] <= queries) & (positions[:, None] > queries - reach)
        seen &= np.arange(num_queries) < real
        edges = _cached_rows(table, positions, 1, block_size, num_kv_heads)
        units, runs = units[runs >= 0], runs[runs >= 0]
        needed = (edges >= 0) & seen.any(1)
        if whole_blocks:
            runs = _in_whole_blocks(runs, units, block_size // tokens)
        edges, seen = edges[needed], seen[needed]
        if not len(runs) and not len(edges):
            return
        for group in range(num_groups):
            rows_before = group * heads * block_size
            own_runs = np.where(runs < 0, -1, runs + rows_before // tokens)
            self.runs[first_chain + group] = own_runs
            self.edges[first_chain + group] = edges + rows_before, seen


def _cached_rows(
    table: Array, units: Array, unit: int, block_size: int, num_kv_heads: int
) -> Array:
    """Rows of `unit` tokens of KV head 0 in the cache; -1 where the block is absent."""
    per_block = block_size // unit
    block = table[units // per_block].astype(np.int64)
    rows = block * num_kv_heads * per_block + units % per_block
    return np.where(block == UNUSED_BLOCK, -1, rows)


def _in_whole_blocks(runs: Array, units: Array, per_block: int) -> Array:
    """Runs in blocks of `per_block` places, -1 at those that are missing.

    `units` counts the runs from the request's start: a table may name a block twice in a row.
    """
    entries, place = units // per_block, units % per_block
    starts = np.flatnonzero(np.diff(entries, prepend=-1))
    of_block = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(runs)))
    placed = np.full((len(starts), per_block), -1, np.int64)
    placed[of_block, place] = runs
    return placed.ravel()
