"""The chunk for the bounded softmax: loads, and what is made of them while blocks are computed.

A *piece* is BLOCK_TILES tiles of the keys or of the values, or a block of the share's queries.
Blocks are computed in order, the first rows first, so that a block needs few pieces more than the
one before; they are made one block ahead, in small steps between macros.
"""

from .backend import nisa, nl
from .bounded import BLOCK_TILES, BoundedRows, values_with_ones
from .loading import RowTiles, each_element, row_tile_view, runs_of, zero_rows
from .tile_schedule import MATMUL_COLUMNS, PARTITIONS


class ChunkStream(nl.NKIObject):
    """Key columns, values and query columns of a share, piece by piece."""

    def __init__(
        self,
        rows: BoundedRows,
        q: nl.NkiTensor,  # [H, S, d] HBM
        k: nl.NkiTensor,  # [KV, S, d] HBM
        v: nl.NkiTensor,  # [KV, S, d] HBM
        kv_head: int,
        every_valid: nl.NkiTensor,  # [128, S / 128] uint8: real rows of the chunk
    ) -> None:
        d = k.shape[2]
        share = rows.share
        self.rows = rows
        self.every_valid = every_valid
        # [128, tiles] uint8: real rows of the share, to be set before the first step.
        self.tile_valid = every_valid
        # The share sees no keys beyond its last row tile.
        self.num_keys = share.row_tiles[len(share.row_tiles) - 1] + 1
        self.keys = nl.ndarray((d, self.num_keys * PARTITIONS), dtype=k.dtype, buffer=nl.sbuf)
        self.values = nl.ndarray(
            (PARTITIONS, self.num_keys * (d + 1)), dtype=v.dtype, buffer=nl.sbuf
        )
        self.k_rows = nl.ndarray((PARTITIONS, self.num_keys * d), dtype=k.dtype, buffer=nl.sbuf)
        self.v_rows = nl.ndarray((PARTITIONS, self.num_keys * d), dtype=v.dtype, buffer=nl.sbuf)
        self.q_rows = nl.ndarray((PARTITIONS, rows.num_tiles * d), dtype=q.dtype, buffer=nl.sbuf)
        self.k_real: list[nl.NkiTensor] = []
        self.q_real: list[nl.NkiTensor] = []
        # Steps in their order, (what, piece), and how many of them come before each block.
        self.order: list[tuple[str, int]] = []
        self.ready: list[int] = []
        # How many come before the sample of scores that the shift is estimated from.
        self.before_sample = 0
        self.done = 0
        self.plan()
        self.steps = len(self.order)
        self.hbm = [q, k, v]
        self.kv_head = kv_head
        self.loaded = 0
        self.load_upto(max(self.ready[0], self.before_sample))

    def pieces_of_keys(self, block: int) -> int:
        """Pieces of keys that a block and those before it need."""
        last = self.rows.row_tile(block * BLOCK_TILES + self.rows.tiles_of(block) - 1)
        return last // BLOCK_TILES + 1

    def plan(self) -> None:
        """Rows one block before columns, columns and values before their block."""
        num_blocks = self.rows.num_blocks
        sampled = (self.rows.share.num_heads - 1) // BLOCK_TILES
        zeroed = 0
        columns = 0
        for block in range(-1, num_blocks):
            needed = 0
            if block >= 0:
                needed = self.pieces_of_keys(block)
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

    def load_rest(self) -> None:
        """Start the loads of all later blocks."""
        self.load_upto(self.steps)

    def load_upto(self, end: int) -> None:
        """Start the loads that the steps before `end` need, in the order of their use."""
        q, k, v = self.hbm
        for i in range(self.loaded, end):
            what, piece = self.order[i]
            if what == "zero keys":
                self.load_keys(k, self.kv_head, piece, self.k_rows)
                self.load_keys(v, self.kv_head, piece, self.v_rows)
            elif what == "zero queries":
                self.load_queries(q, piece)
        self.loaded = end

    def load_keys(self, hbm: nl.NkiTensor, kv_head: int, piece: int, rows: nl.NkiTensor) -> None:
        """A piece of the keys or values."""
        d = self.rows.d
        first = piece * BLOCK_TILES
        count = self.tiles_of_keys(piece)
        nisa.dma_copy(
            dst=rows[:, first * d : (first + count) * d],
            src=row_tile_view(hbm, kv_head, 1, first, count),
            dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.scalar,
        )  # fmt: skip

    def load_queries(self, q: nl.NkiTensor, block: int) -> None:
        """The row tiles that a block is the first to need, all heads of them."""
        share = self.rows.share
        width = share.num_heads * self.rows.d
        begin = (block * BLOCK_TILES + share.num_heads - 1) // share.num_heads
        end = ((block + 1) * BLOCK_TILES + share.num_heads - 1) // share.num_heads
        end = min(end, len(share.row_tiles))
        if begin < end:
            for run in runs_of(share.row_tiles, begin, end - begin):
                tile, length = run
                nisa.dma_copy(
                    dst=self.q_rows[:, tile * width : (tile + length) * width],
                    src=row_tile_view(
                        q, share.first_head, share.num_heads, share.row_tiles[tile], length
                    ),
                )

    def tiles_of_keys(self, piece: int) -> int:
        """Tiles of a piece of the keys."""
        return min(BLOCK_TILES, self.num_keys - piece * BLOCK_TILES)

    def step(self) -> None:
        """The next step."""
        what, piece = self.order[self.done]
        d = self.rows.d
        first = piece * BLOCK_TILES
        if what == "zero keys":
            end = first + self.tiles_of_keys(piece)
            self.k_real.append(
                zero_rows(
                    self.k_rows[:, first * d : end * d],
                    each_element(self.every_valid[:, first:end], 1, d),
                    self.k_rows.dtype,
                )
            )
        elif what == "zero queries":
            end = first + self.rows.tiles_of(piece)
            self.q_real.append(
                zero_rows(
                    self.q_rows[:, first * d : end * d],
                    each_element(self.tile_valid[:, first:end], 1, d),
                    self.q_rows.dtype,
                )
            )
        elif what == "key columns":
            count = self.tiles_of_keys(piece)
            self.rows.transpose(
                RowTiles(self.k_real[piece], d, d), 0, count,
                self.keys[:, first * PARTITIONS : (first + count) * PARTITIONS],
            )  # fmt: skip
        elif what == "query columns":
            count = self.rows.tiles_of(piece)
            begin = piece * MATMUL_COLUMNS
            self.rows.transpose(
                RowTiles(self.q_real[piece], d, d), 0, count,
                self.rows.queries[:, begin : begin + count * PARTITIONS],
            )  # fmt: skip
        else:
            values_with_ones(
                self.v_rows, self.every_valid[:, 0 : self.num_keys], self.values, first,
                self.tiles_of_keys(piece),
            )  # fmt: skip
        self.done = self.done + 1

    def finish_sample(self) -> None:
        """All steps that the columns of the share's first row tile need."""
        while self.done < self.before_sample:
            self.step()

    def finish_upto(self, block: int) -> None:
        """All steps that a block needs."""
        while self.done < self.ready[block]:
            self.step()
