"""What each request of a decode step needs of the cache: runs of common tokens, and edges.

A cached token is *common* if every real query of the request sees it. The others that a query sees
are on the causal or on the window's edge.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...reference.paging import UNUSED_BLOCK, cdiv
from ..arrays import Array
from .decode_shape import DecodeShape


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
    causal: bool = True
    tree: Array | None = None  # [B, T, T] bool: new tokens that a query sees

    @cached_property
    def first_query(self) -> Array:
        """Position of each request's first query."""
        return self.context_lens - self.query_lens

    @cached_property
    def seen_by_all(self) -> Array:
        """Tokens from the first on that every query sees, but for a window."""
        if not self.causal:
            return self.context_lens
        return self.first_query + (self.tree is None)

    @cached_property
    def reach(self) -> Array:
        """Tokens that a query sees, itself included, if there are so many."""
        if self.window is None:
            return self.context_lens.astype(np.int64)
        return np.minimum(self.context_lens, self.window).astype(np.int64)

    @cached_property
    def seen_tokens(self) -> list[tuple[int, int]]:
        """The first token that a query of each request sees, and the one after the last."""
        ends = np.where(self.active, self.context_lens, 0)
        firsts = np.clip(self.first_query + 1 - self.reach, 0, ends)
        return list(zip(firsts.tolist(), ends.tolist(), strict=True))

    @cached_property
    def active(self) -> Array:
        """Whether a request has a query."""
        return (self.query_lens > 0) & (self.context_lens > 0)

    def rows(self, blocks: Array, place: Array, tokens: int) -> Array:
        """Cache rows of `tokens` tokens, KV head 0: negative where the block is absent."""
        return blocks * (self.num_kv_heads * (self.block_size // tokens)) + place


@dataclass(frozen=True)
class CommonRuns:
    """Runs of common tokens, request by request."""

    first: Array
    """[B], run of the context."""
    end: Array
    """[B]."""
    rows: Array
    """[runs] int32, cache rows, KV head 0."""
    counts: Array
    """[B], how many a request has."""


def common_runs(shape: DecodeShape, step: Step) -> CommonRuns:
    """Those of a step; absent blocks have none."""
    size = shape.tokens
    per_block = step.block_size // size
    first = -(-np.maximum(0, step.context_lens - step.reach) // size)
    end = np.maximum(first, step.seen_by_all // size)
    reached = np.where(step.active, end, first)
    blocks = step.tables[:, : cdiv(int(reached.max()), per_block), None].astype(np.int32)
    rows = step.rows(blocks, np.arange(per_block, dtype=np.int32), size)
    rows = rows.reshape(len(first), -1)
    unit = np.arange(rows.shape[1])
    chosen = (unit < reached[:, None]) & (rows >= 0)
    if step.window is not None:
        chosen &= unit >= first[:, None]
    return CommonRuns(first, end, rows[chosen], np.count_nonzero(chosen, 1))


@dataclass(frozen=True)
class EdgeRuns:
    """The edge runs of all requests."""

    rows: Array
    """[B, edge runs] cache rows, KV head 0; -1: nothing."""
    seen: Array
    """[B, edge runs, T * e]: which query sees which token."""


def edge_runs(shape: DecodeShape, step: Step, common: CommonRuns) -> EdgeRuns:
    """Those before and behind the common tokens."""
    e, per_run = shape.edge_tokens, shape.tokens // shape.edge_tokens
    begin, end = common.end * per_run, -(-step.context_lens // e)
    if step.window is None:
        unit = begin[:, None] + np.arange(shape.edge_runs)
        exists = unit < end[:, None]
    else:
        # Before the common tokens, and behind them.
        half = np.arange(shape.edge_runs // 2)
        left_end = np.minimum(end, common.first * per_run)
        left = left_end[:, None] - 1 - half
        right = begin[:, None] + half
        seen_from = np.maximum(0, step.first_query - step.reach + 1)
        unit = np.concatenate([left, right], 1)
        exists = np.concatenate([left >= (seen_from // e)[:, None], right < end[:, None]], 1)
    entry, place = np.divmod(unit, step.block_size // e)
    requests, width = step.tables.shape
    blocks = step.tables[np.arange(requests)[:, None], np.clip(entry, 0, width - 1)]
    exists &= step.active[:, None] & (blocks != UNUSED_BLOCK)
    positions = (unit[..., None] * e + np.arange(e))[:, :, None]
    seen = exists[:, :, None, None] & _seen(step, positions, np.arange(shape.num_queries)[:, None])
    seen = seen.reshape(*unit.shape, -1)
    return EdgeRuns(np.where(seen.any(2), step.rows(blocks, place, e), -1), seen)


def _seen(step: Step, positions: Array, query: Array) -> Array:
    """Which query [T, 1] sees which of positions [B, n, 1, e]: [B, n, T, e]."""
    first, lens, context, reach = (
        each[:, None, None, None]
        for each in (step.first_query, step.query_lens, step.context_lens, step.reach)
    )
    new = positions - first
    if not step.causal:
        seen = positions < context
    elif step.tree is None:
        seen = new <= query
    else:
        most = step.tree.shape[2]
        request = np.arange(len(step.tree))[:, None, None, None]
        seen = (new < 0) | ((new < lens) & step.tree[request, query, np.clip(new, 0, most - 1)])
    if step.window is not None:
        seen = seen & (new > query - reach)
    found: Array = seen & (query < lens)
    return found
