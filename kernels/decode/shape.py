"""Sizes of a compiled paged_decode: of its slots, groups and trips, from the shapes of a call."""

from dataclasses import dataclass

from ...reference.paging import cdiv
from ..tile_schedule import MATMUL_COLUMNS, PARTITIONS
from .tensors import SLOT_BYTES, packed_tokens

TOKENS = 16
"""Most tokens of a run: 4 KiB of a 16-bit head of 128, which saturates a DMA descriptor; no more
than the smallest block."""

FAST_STRIDE = 16
"""Most bytes between elements that the engines read at full speed."""

GROUP_BYTES = 4 * SLOT_BYTES
"""Most bytes of a group's keys per partition."""

STAGED_BYTES = 4 * GROUP_BYTES
"""Most bytes of the keys of a trip per partition; as many values beside them."""

GROUPS = 4
"""Groups that a trip's work is spread over if it has more slots than that, so that loads, scores
and values overlap; at most twice as many make a trip."""

MOST_MATMULS = 15_500
"""Matmuls and transposes of a program: with all else it stays below 20,000 instructions."""

MOST_PLAN_BYTES = 1 << 30
"""Most bytes of a plan: its arrays lie in HBM, and their offsets are 32-bit numbers."""

USABLE_BYTES = 208 << 10
"""SBUF bytes per partition."""

SHARED_BYTES = 16 << 10
"""Of them for what the groups share: key columns, constants, temporary tiles."""

SCORE_BANKS = 2
"""PSUM banks of the scores of a group, at most."""


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
    groups: int
    edge_tiles: int
    """Tiles of 128 edge tokens per group."""
    trips: int
    """Most trips."""
    edge_runs: int = 0
    """Runs that hold the edge tokens of a slot, with a pre-transposed K cache."""

    def plan_bytes(self, num_queries: int, num_cores: int) -> int:
        """About the size of the plan's arrays, as large as the tables allow."""
        lists = 4 * (self.slots + self.edge_tiles) + 2 * self.slots
        flags = self.edge_tiles * self.slots * num_queries
        entries = num_cores * (self.trips + 1) * self.groups
        return entries * PARTITIONS * (lists + flags)


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
    while tokens > 1 and (
        2 * tokens * PARTITIONS * num_cores >= 3 * table_tokens
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
    slots_of_chain = cdiv(table_tokens, tokens * PARTITIONS)
    total = cdiv(num_requests * (num_kv_heads // heads) * slots_of_chain, num_cores)
    per_bank = MATMUL_COLUMNS // (tokens * rows)
    fitting = min(
        total if total <= GROUPS else cdiv(total, GROUPS),
        GROUP_BYTES // (heads * tokens * head_bytes), PARTITIONS // rows, per_bank * SCORE_BANKS,
    )  # fmt: skip
    slots = fitting if fitting <= per_bank else fitting // SCORE_BANKS * SCORE_BANKS
    staged = STAGED_BYTES // (slots * heads * tokens * head_bytes)
    groups = min(cdiv(total, slots), 2 * GROUPS, staged)
    if groups > GROUPS and 8 * total <= 9 * GROUPS * slots:
        # A table a little longer than a trip: only contexts that reach its end take a second one.
        groups = GROUPS
    edges = (1 + has_window) * (tokens + num_queries - 2)
    edge_runs = 0
    if k_pre_transposed:
        edge_runs = max(1, (1 + has_window) * cdiv(tokens + num_queries - 2, tokens))
        edges = edge_runs * tokens
    edge_tiles = max(1, cdiv(slots * edges, PARTITIONS))
    parts, query_parts = cdiv(head_dim, PARTITIONS), cdiv(head_dim, PARTITIONS)
    pack = 1
    if not k_pre_transposed:
        pack = packed_tokens(head_dim * stored // itemsize, tokens)
        query_parts = parts if stored == itemsize else 2
    own = _bytes_of_group(
        heads, rows, tokens, slots, edge_tiles, num_queries, head_dim, head_bytes, itemsize,
        stored, k_pre_transposed, pack * query_parts,
    )  # fmt: skip
    chunks = heads * (slots * tokens // pack + edge_tiles)
    values = heads * (slots * tokens + edge_tiles) * parts
    # The first trip and the body of the loop hold all groups.
    matmuls = 2 * (chunks * (parts + query_parts) + values)
    most = min((USABLE_BYTES - SHARED_BYTES) // own, MOST_MATMULS // matmuls)
    groups = max(1, min(groups, most))
    trips = cdiv(total, slots * groups)
    return DecodeShape(heads, rows, tokens, slots, groups, edge_tiles, trips, edge_runs)


def _bytes_of_group(
    heads: int,
    rows: int,
    tokens: int,
    slots: int,
    edge_tiles: int,
    num_queries: int,
    head_dim: int,
    head_bytes: int,
    itemsize: int,
    stored: int,
    k_pre_transposed: bool,
    query_columns: int,
) -> int:
    """SBUF bytes per partition of the tiles of one DecodeStage, DecodeGroup and SlotSums."""
    columns, parts = slots * rows, cdiv(head_dim, PARTITIONS)
    staged = (slots * tokens + edge_tiles) * heads * (head_bytes + head_dim * stored)
    lists = slots * (12 + 2 * PARTITIONS) + edge_tiles * (4 + slots * num_queries)
    lists += head_dim * itemsize
    if k_pre_transposed:
        lists += (slots + edge_tiles) * PARTITIONS
    weights = (query_columns + tokens + edge_tiles) * columns * itemsize
    numbers = 4 * columns * (3 + edge_tiles + parts)
    sums = 4 * (slots + 1) * (rows * (5 + 2 * parts) + 1)
    return staged + lists + weights + numbers + sums
