"""Sizes of a compiled paged_decode: of its slots and groups, from the shapes of a call."""

from dataclasses import dataclass

from ...reference.paging import cdiv
from ..sizes import EDGE_COLUMN, MATMUL_COLUMNS, PARTITIONS, SLOT_BYTES
from .decode_spans import most_slots

TOKENS = 16
"""Most tokens of a run: 4 KiB of a 16-bit head of 128, which saturates a DMA descriptor; no more
than the smallest block."""

FAST_STRIDE = 16
"""Most bytes between elements that the engines read at full speed."""

GROUP_BYTES = 4 * SLOT_BYTES
"""Most bytes of a group's keys per partition."""

GROUP_SLOTS = 8
"""Most slots of a group: the last group of a step is computed whole, however few slots it has."""

SHARED_SLOTS = 4
"""The same where chains share slots: PSUM has one bank for the scores of two of them."""

SLOT_SPANS = 4
"""Most chains that share a slot."""

SHARED_COLUMNS = 256
"""Most columns of scores of a slot that is shared although a chain may fill it: DVE passes over
the columns of all spans, used or not."""

MOST_PLAN_BYTES = 1 << 30
"""Most bytes of a plan: its arrays lie in HBM, and their offsets are 32-bit numbers."""

SCORE_BANKS = 4
"""PSUM banks of the scores of a group, at most: transposes need two, sums and small numbers one."""


@dataclass(frozen=True)
class DecodeShape:
    """Sizes of a compiled kernel: they depend on shapes only, never on lengths."""

    heads: int
    """KV heads of a chain."""
    rows: int
    """Query rows of a chain: heads * H / KV * T."""
    tokens: int
    """Tokens of a run: of one partition of a slot."""
    slots: int
    """Slots of a group."""
    slot_spans: int
    """Chains that may share a slot."""
    edge_tiles: int
    """Tiles of 128 edge tokens per group."""
    groups: int
    """Most groups."""
    edge_runs: int = 0
    """Runs that hold the edge tokens of a span, with a pre-transposed K cache."""

    @property
    def spans(self) -> int:
        """Spans of a group."""
        return self.slots * self.slot_spans

    def plan_bytes(self, num_queries: int, num_cores: int) -> int:
        """About the size of the plan's arrays, as large as the tables allow."""
        lists = 4 * (self.slots + self.edge_tiles) + 2 * self.spans
        flags = self.edge_tiles * self.spans * num_queries
        return num_cores * (self.groups + 2) * PARTITIONS * (lists + flags)


def decode_shape(
    num_requests: int,
    num_kv_heads: int,
    rows_per_kv_head: int,
    num_queries: int,
    head_dim: int,
    itemsize: int,
    table_tokens: int,
    has_window: bool,
    num_cores: int,
    k_pre_transposed: bool = False,
    fp8: bool = False,
) -> DecodeShape:
    """Sizes for these shapes; rows_per_kv_head is at most 128, itemsize that of q."""
    # Columns of keys take the partitions of 128 features, however few there are.
    stored = 1 if fp8 else itemsize
    head_bytes = (max(head_dim, PARTITIONS) if k_pre_transposed else head_dim) * stored
    tokens = TOKENS
    # The columns of a token of each run are `tokens` apart, and DVE reads no wider at full speed. A
    # DMA brings the columns of a block for all heads of a chain: rather more heads than tokens.
    while (
        k_pre_transposed
        and tokens > 1
        and (tokens * itemsize > FAST_STRIDE or tokens * num_kv_heads > TOKENS)
    ):
        tokens //= 2
    # A slot that few chains can fill has short runs, on all partitions.
    while tokens > 1 and (
        2 * tokens * PARTITIONS * num_cores
        >= 3 * table_tokens * min(num_requests, _most_spans(tokens * rows_per_kv_head))
        or tokens * head_bytes > SLOT_BYTES
        or tokens * rows_per_kv_head > MATMUL_COLUMNS
    ):
        tokens //= 2
    heads = num_kv_heads
    while (
        num_kv_heads % heads
        or heads * tokens * head_bytes > SLOT_BYTES
        or heads * tokens * rows_per_kv_head > MATMUL_COLUMNS
        or heads * rows_per_kv_head > PARTITIONS
    ):
        heads -= 1
    rows = heads * rows_per_kv_head
    num_chains = num_requests * (num_kv_heads // heads)
    runs = cdiv(table_tokens, tokens)
    per_bank = MATMUL_COLUMNS // (tokens * rows)
    edges = (1 + has_window) * (tokens + num_queries - 2)
    edge_runs = 0
    if k_pre_transposed:
        edge_runs = max(1, (1 + has_window) * cdiv(tokens + num_queries - 2, tokens))
        edges = edge_runs * tokens
    slot_spans = _slot_spans(cdiv(num_chains, num_cores), runs, rows, tokens)
    total = cdiv(most_slots(num_chains, runs, slot_spans), num_cores) + num_cores - 1
    per_bank //= slot_spans
    slots = min(
        total, GROUP_SLOTS if slot_spans == 1 else SHARED_SLOTS,
        GROUP_BYTES // (heads * tokens * head_bytes), PARTITIONS // (rows * slot_spans),
        per_bank * SCORE_BANKS,
    )  # fmt: skip
    while True:
        edge_tiles = max(1, cdiv(slots * slot_spans * edges, PARTITIONS))
        edge_columns = edge_tiles * slots * slot_spans * rows
        if slots % cdiv(slots, per_bank) == 0 and edge_columns <= MATMUL_COLUMNS - EDGE_COLUMN:
            break
        slots -= 1
    groups = cdiv(total, slots)
    return DecodeShape(heads, rows, tokens, slots, slot_spans, edge_tiles, groups, edge_runs)


def _most_spans(columns: int) -> int:
    """Chains that can share a slot, from the columns of scores of one."""
    return max(1, min(SLOT_SPANS, MATMUL_COLUMNS // columns))


def _slot_spans(num_chains: int, runs: int, rows: int, tokens: int) -> int:
    """Chains that share a slot, of chains with at most so many runs."""
    if num_chains == 1 or runs == PARTITIONS:
        return 1
    most = min(num_chains, _most_spans(rows * tokens), PARTITIONS // rows)
    if 2 * runs > PARTITIONS:
        return min(most, 2, max(1, SHARED_COLUMNS // (rows * tokens)))
    return min(most, PARTITIONS // runs)
