"""Sizes of a compiled paged_decode, from the shapes of a call."""

from dataclasses import dataclass
from functools import cached_property

from ...reference.paging import cdiv
from ..sizes import MATMUL_COLUMNS, PARTITIONS
from .work_tiles import most_tiles

RUN_BYTES = 8192
"""Most bytes of a run, which one descriptor moves: descriptors cost about 15 ns each. Twice as many
of pre-transposed keys."""

EDGE_BYTES = 65536
"""Most bytes per partition of a batch's edge keys and values, and of the values' copies."""

SHORTEST_RUN = 8
"""Runs are not cut below so many tokens to fill the partitions of a work tile."""

EDGE_TOKENS = 4
"""Most tokens of a run at a sequence's edge, whose tokens are masked one by one."""

MOST_TILES = 8
"""Most work tiles of a batch: the last batch of a step is computed whole."""

TILE_SEGMENTS = 4
"""Most sequences that share a work tile."""

SHARED_COLUMNS = 256
"""Most columns of scores of a tile that is shared although a sequence may fill it."""

MOST_PLAN_BYTES = 1 << 30
"""Most bytes of a plan: its arrays lie in HBM, and their offsets are 32-bit numbers."""


@dataclass(frozen=True)
class DecodeShape:
    """Sizes of a compiled kernel: they depend on shapes only, never on lengths."""

    rows: int
    """Query rows of a sequence: H / KV * T."""
    num_queries: int
    """T."""
    tokens: int
    """Tokens of a run: of one partition of a work tile."""
    tiles: int
    """Work tiles of a batch."""
    tile_segments: int
    """Sequences that may share a work tile."""
    edge_tokens: int
    """Tokens of an edge run."""
    edge_runs: int
    """Most edge runs of a sequence."""
    batches: int
    """Most batches of a core."""
    batch_invariant: bool
    """Every sequence has tiles, edges and a core of its own: nothing that is added up depends on
    another one or on where it stands."""

    @cached_property
    def segments(self) -> int:
        """Segments of a batch."""
        return self.tiles * self.tile_segments

    @cached_property
    def part_segments(self) -> int:
        """Segments whose edge runs and query rows lie on 128 partitions together."""
        if self.batch_invariant:
            return 1
        return min(
            self.segments, PARTITIONS // self.rows, PARTITIONS // self.edge_runs,
            MATMUL_COLUMNS // (self.edge_tokens * self.rows),
        )  # fmt: skip

    @cached_property
    def parts(self) -> int:
        """Parts of a batch."""
        return cdiv(self.segments, self.part_segments)

    @cached_property
    def flag_columns(self) -> int:
        """Bytes per partition of a batch's flags."""
        edges = self.parts * self.edge_tokens
        return self.parts + edges + self.segments * self.num_queries * self.edge_tokens

    def plan_bytes(self, num_cores: int) -> int:
        """Size of the plan's lists."""
        words = 2 * self.tiles + 5 * self.parts + self.segments
        return num_cores * self.batches * PARTITIONS * (4 * words + self.flag_columns)


@dataclass(frozen=True)
class DecodeCall:
    """What the sizes follow from."""

    num_requests: int
    num_kv_heads: int
    rows: int  # H / KV * T, at most 128
    num_queries: int
    head_dim: int
    block_size: int
    itemsize: int  # of the K cache
    table_tokens: int
    has_window: bool
    num_cores: int
    k_pre_transposed: bool = False
    batch_invariant: bool = False
    has_tree: bool = False


def decode_shape(call: DecodeCall) -> DecodeShape:
    """Sizes for these shapes."""
    rows, queries = call.rows, call.num_queries
    sequences = call.num_requests * call.num_kv_heads
    head_bytes = call.head_dim * call.itemsize
    tokens = call.block_size
    # Whole blocks of pre-transposed keys are long runs, pieces of them are not.
    most_bytes = RUN_BYTES << call.k_pre_transposed
    while tokens * head_bytes > most_bytes or tokens * rows > MATMUL_COLUMNS:
        tokens //= 2
    # A tile that few sequences can fill has short runs, on all partitions.
    while (
        tokens > SHORTEST_RUN
        and not (call.k_pre_transposed or call.batch_invariant)
        and 2 * tokens * PARTITIONS * call.num_cores
        >= 3 * call.table_tokens * min(sequences, call.num_cores * _most_segments(tokens * rows))
    ):
        tokens //= 2
    runs = cdiv(call.table_tokens, tokens)
    tile_segments = _tile_segments(cdiv(sequences, call.num_cores), runs, rows, tokens)
    if call.batch_invariant:
        tile_segments = 1
    elif call.k_pre_transposed:
        tile_segments = min(tile_segments, 2)
    # Only whole blocks of pre-transposed keys are long runs, at the edges as well.
    whole = call.k_pre_transposed and tokens == call.block_size
    edge = tokens if whole else min(tokens, EDGE_TOKENS)
    while edge * rows > MATMUL_COLUMNS:
        edge //= 2
    edge_runs = (1 + call.has_window) * max(1, cdiv(tokens + queries - 2 + call.has_tree, edge))
    total = cdiv(most_tiles(sequences, runs, tile_segments), call.num_cores) + call.num_cores - 1
    if call.batch_invariant and call.num_cores == 2:
        # A core may have one sequence more than half.
        total += cdiv(runs, PARTITIONS)
    most = max(1, min(MOST_TILES, total, MATMUL_COLUMNS // (tile_segments * rows)))
    while True:
        batches = cdiv(total, most)
        tiles = cdiv(total, batches)
        shape = DecodeShape(
            rows, queries, tokens, tiles, tile_segments, edge, edge_runs, batches,
            call.batch_invariant,
        )  # fmt: skip
        if most == 1 or 3 * shape.parts * edge * head_bytes <= EDGE_BYTES:
            return shape
        most -= 1


def _most_segments(columns: int) -> int:
    """Sequences that can share a tile, from the columns of scores of one."""
    return max(1, min(TILE_SEGMENTS, MATMUL_COLUMNS // columns))


def _tile_segments(sequences: int, runs: int, rows: int, tokens: int) -> int:
    """Sequences that share a tile, of sequences with at most so many runs."""
    if sequences == 1 or runs % PARTITIONS == 0:
        return 1
    most = min(sequences, _most_segments(rows * tokens), PARTITIONS // rows)
    if 2 * runs > PARTITIONS:
        return max(1, min(most, 2, SHARED_COLUMNS // (rows * tokens)))
    return max(1, min(most, PARTITIONS // runs))
