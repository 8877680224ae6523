"""The chunk of a share: loads, and what is made of them while blocks are computed.

A *piece* is BLOCK_TILES tiles of the keys or of the values, or a block of the share's queries.
Blocks are computed in order, the first rows first, so that a block needs few pieces more than the
one before; they are made one block ahead, in small steps between macros. Keys and values stay for
the later shares of their KV head.
"""

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..loading import (
    each_element,
    new_columns,
    row_tile_view,
    runs_of,
    transpose_features,
    values_with_ones,
    zero_rows,
)
from .bounded import BoundedRows
from .exact_rows import ExactRows
from .share_tiles import BLOCK_TILES

LOADED_AHEAD = 20
"""Steps whose loads are started ahead of them: SBUF does not hold all rows of a long fp32 chunk
beside what is made of them."""


class ChunkKeys(nl.NKIObject):
    """Key columns and values of a KV head's chunk, piece by piece."""

    def __init__(
        self,
        k: nl.NkiTensor,  # [KV, S, d] HBM
        v: nl.NkiTensor,  # [KV, S, d] HBM
        kv_head: int,
        every_valid: nl.NkiTensor,  # [128, S / 128] uint8: real rows of the chunk
    ) -> None:
        _, num_rows, d = k.shape
        self.k = k
        self.v = v
        self.kv_head = kv_head
        self.every_valid = every_valid
        self.d = d
        self.num_tiles = num_rows // PARTITIONS
        self.keys = new_columns(self.num_tiles, d, k.dtype)
        self.values = nl.ndarray(
            (PARTITIONS, self.num_tiles * (d + 1)), dtype=v.dtype, buffer=nl.sbuf
        )
        self.k_rows: list[nl.NkiTensor] = []
        self.v_rows: list[nl.NkiTensor] = []
        self.k_real: list[nl.NkiTensor] = []
        for _ in range(0, self.num_tiles, BLOCK_TILES):
            shape = (PARTITIONS, BLOCK_TILES * d)
            self.k_rows.append(nl.ndarray(shape, dtype=k.dtype, buffer=nl.sbuf))
            self.v_rows.append(nl.ndarray(shape, dtype=v.dtype, buffer=nl.sbuf))
            self.k_real.append(self.values)
        # Pieces that the shares so far have made.
        self.made = 0

    def tiles_of(self, piece: int) -> int:
        """Tiles of a piece."""
        return min(BLOCK_TILES, self.num_tiles - piece * BLOCK_TILES)

    def load(self, piece: int) -> None:
        """Start the loads of a piece."""
        count = self.tiles_of(piece)
        first = piece * BLOCK_TILES
        for each in [(self.k, self.k_rows[piece]), (self.v, self.v_rows[piece])]:
            hbm, rows = each
            nisa.dma_copy(
                dst=rows[:, 0 : count * self.d],
                src=row_tile_view(hbm, self.kv_head, 1, first, count),
                dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.scalar,
            )  # fmt: skip

    def zero_padding(self, piece: int) -> None:
        """Make the padding rows of the keys zero."""
        count, d = self.tiles_of(piece), self.d
        first = piece * BLOCK_TILES
        self.k_real[piece] = zero_rows(
            self.k_rows[piece][:, 0 : count * d],
            each_element(self.every_valid[:, first : first + count], 1, d),
            self.k.dtype,
        )

    def write_columns(self, piece: int, rows: BoundedRows | ExactRows) -> None:
        """Key columns of a piece, through the spare PSUM of `rows`."""
        count = self.tiles_of(piece)
        first = piece * BLOCK_TILES
        transpose_features(rows, self.k_real[piece], self.d, 0, count, self.keys, first)

    def write_values(self, piece: int) -> None:
        """Values of a piece, next to ones."""
        count, d = self.tiles_of(piece), self.d
        first = piece * BLOCK_TILES
        values_with_ones(
            self.v_rows[piece][:, 0 : count * d], self.every_valid[:, first : first + count],
            self.values[:, first * (d + 1) : (first + count) * (d + 1)], 0, count,
        )  # fmt: skip


class ChunkStream(nl.NKIObject):
    """Query columns of a share, and what its blocks need of the keys and values."""

    def __init__(
        self,
        rows: BoundedRows | ExactRows,
        q: nl.NkiTensor,  # [H, S, d] HBM
        chunk: ChunkKeys,
        tile_valid: nl.NkiTensor,  # [128, tiles] uint8: real rows of the share, written later
    ) -> None:
        self.rows = rows
        self.q = q
        self.chunk = chunk
        self.tile_valid = tile_valid
        self.q_rows = nl.ndarray(
            (PARTITIONS, rows.tiles.num_tiles * rows.tiles.d), dtype=q.dtype, buffer=nl.sbuf
        )
        self.q_real: list[nl.NkiTensor] = []
        # Steps in their order, (what, piece), and how many of them come before each block.
        self.order: list[tuple[str, int]] = []
        self.ready: list[int] = []
        # How many come before the sample of scores that the shift is estimated from.
        self.before_sample = 0
        self.done = 0
        self.plan()
        self.steps = len(self.order)
        self.vector_ns = 400.0
        self.loaded = 0
        self.is_loading = False

    def plan(self) -> None:
        """Rows one block before columns, columns and values before their block."""
        num_blocks = self.rows.tiles.num_blocks
        sampled = (self.rows.tiles.share.num_heads - 1) // BLOCK_TILES
        zeroed = self.chunk.made
        columns = zeroed
        for block in range(-1, num_blocks):
            needed = columns
            if block >= 0:
                needed = max(needed, self.pieces_of_keys(block))
                for piece in range(columns, needed):
                    self.order.append(("key columns", piece))
                self.order.append(("query columns", block))
            if block == sampled:
                self.before_sample = len(self.order)
            following = block + 1
            if following < num_blocks:
                for piece in range(zeroed, self.pieces_of_keys(following)):
                    self.order.append(("zero keys", piece))
                    zeroed = piece + 1
                self.order.append(("zero queries", following))
            for piece in range(columns, needed):
                self.order.append(("values", piece))
            if block >= 0:
                columns = needed
                self.ready.append(len(self.order))
        chunk = self.chunk
        chunk.made = columns

    def pieces_of_keys(self, block: int) -> int:
        """Pieces of keys that a block and those before it need."""
        return (self.rows.tiles.num_keys(block) + BLOCK_TILES - 1) // BLOCK_TILES

    def begin(self) -> None:
        """Start the loads that the first block and the sample need."""
        self.load_upto(max(self.ready[0], self.before_sample))

    def load_rest(self) -> None:
        """Start the loads of later blocks, and go on with it from step to step."""
        self.is_loading = True
        self.load_upto(min(self.steps, self.done + LOADED_AHEAD))

    def load_upto(self, end: int) -> None:
        """Start the loads that the steps before `end` need, in the order of their use."""
        for i in range(self.loaded, end):
            what, piece = self.order[i]
            if what == "zero keys":
                self.chunk.load(piece)
            elif what == "zero queries":
                self.load_queries(piece)
        self.loaded = end

    def load_queries(self, block: int) -> None:
        """The row tiles that a block is the first to need, all heads of them."""
        share = self.rows.tiles.share
        width = share.num_heads * self.rows.tiles.d
        begin = (block * BLOCK_TILES + share.num_heads - 1) // share.num_heads
        end = ((block + 1) * BLOCK_TILES + share.num_heads - 1) // share.num_heads
        end = min(end, len(share.row_tiles))
        if begin < end:
            for run in runs_of(share.row_tiles, begin, end - begin):
                tile, length = run
                nisa.dma_copy(
                    dst=self.q_rows[:, tile * width : (tile + length) * width],
                    src=row_tile_view(
                        self.q, share.first_head, share.num_heads, share.row_tiles[tile], length
                    ),
                )

    def step(self) -> None:
        """The next step."""
        what, piece = self.order[self.done]
        if self.is_loading:
            self.load_rest()
        rows, tiles = self.rows, self.rows.tiles
        d = tiles.d
        if what == "zero keys":
            self.chunk.zero_padding(piece)
        elif what == "key columns":
            self.chunk.write_columns(piece, rows)
        elif what == "values":
            self.chunk.write_values(piece)
        elif what == "zero queries":
            first = piece * BLOCK_TILES
            end = first + tiles.tiles_of(piece)
            self.q_real.append(
                zero_rows(
                    self.q_rows[:, first * d : end * d],
                    each_element(self.tile_valid[:, first:end], 1, d),
                    self.q.dtype,
                )
            )
        else:
            first = piece * BLOCK_TILES
            transpose_features(
                rows, self.q_real[piece], d, 0, tiles.tiles_of(piece), tiles.queries, first
            )
        self.done = self.done + 1

    def finish_sample(self) -> None:
        """All steps that the columns of the share's first row tile need."""
        while self.done < self.before_sample:
            self.step()

    def finish_upto(self, block: int) -> None:
        """All steps that a block needs."""
        while self.done < self.ready[block]:
            self.step()
