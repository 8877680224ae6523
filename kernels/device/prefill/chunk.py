"""The chunk: loads, and what is made of them while q_blocks are computed.

q_blocks are computed in order, the first rows first, so that a q_block needs few pieces of keys and
values more than the one before; they are made one q_block ahead, in small portions beside the
softmax's. Keys and values stay for the later q_groups of their KV head. Where attention is not
causal all of them are made before the first q_block.
"""

from collections.abc import Iterator

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..loading import each_element, row_tile_view, runs_of, values_with_ones
from ..softmax import ScoreScale
from ..tile_schedule import Q_BLOCK_TILES
from .background import Pieces
from .kv_tiles import PIECE_TILES, KvTiles, new_pieces
from .on_chip import sbuf, transpose_features
from .query_tiles import QueryTiles

LOADED_AHEAD = 6
"""q_blocks whose loads are started ahead of them: SBUF does not hold all rows of a long fp32 chunk
beside what is made of them."""


class ChunkKeys:
    """Keys and values of a KV head's chunk, piece by piece; none for cross attention."""

    def __init__(
        self,
        own: tuple[nl.NkiTensor, nl.NkiTensor] | None,  # k and v [KV, S, d] HBM
        kv_head: int,
        every_valid: nl.NkiTensor,  # [128, S / 128] uint8: real rows of the chunk
        like: QueryTiles,
        scale: float,
        absent: nl.NkiTensor | None,  # [1, S] bf16: MASKED at padding keys that rows would see
    ) -> None:
        num_tiles = 0 if own is None else own[0].shape[1] // PARTITIONS
        self._own, self._kv_head, self._every_valid = own, kv_head, every_valid
        self._dtype = like.dtype
        pieces = new_pieces(num_tiles, like.d, like.value_dim, like.dtype)
        self._d = like.d
        self.kv = KvTiles(pieces, like.value_dim, num_tiles, ScoreScale(scale, -scale), 0, absent)
        self.made = 0
        """Pieces that the q_groups so far have made."""
        self._loaded: dict[int, tuple[nl.NkiTensor, nl.NkiTensor]] = {}

    def _range(self, piece: int) -> tuple[int, int]:
        """First row tile of a piece, and how many there are."""
        first = piece * PIECE_TILES
        return first, min(PIECE_TILES, self.kv.count - first)

    def load(self, piece: int) -> None:
        """Start the loads of a piece."""
        assert self._own is not None
        first, count = self._range(piece)
        rows = []
        for hbm in self._own:
            rows.append(sbuf((PARTITIONS, count * hbm.shape[2]), hbm.dtype))
            nisa.dma_copy(
                dst=rows[-1], src=row_tile_view(hbm, self._kv_head, 1, first, count),
                dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.scalar,
            )  # fmt: skip
        self._loaded[piece] = (rows[0], rows[1])

    def zero_padding(self, piece: int) -> None:
        """Make the padding rows of the keys zero."""
        first, count = self._range(piece)
        keys, values = self._loaded[piece]
        valid = each_element(self._every_valid, first, count, self._d)
        real = sbuf(keys.shape, self._dtype)
        nisa.select_reduce(dst=real, predicate=valid, on_true=keys, on_false=0.0)
        self._loaded[piece] = (real, values)

    def write_keys(self, piece: int) -> None:
        """Key columns of a piece."""
        _, count = self._range(piece)
        transpose_features(self._loaded[piece][0], 0, count, self.kv.pieces[piece].keys)

    def write_values(self, piece: int) -> None:
        """Values of a piece, next to ones."""
        first, count = self._range(piece)
        _, values = self._loaded.pop(piece)
        values_with_ones(values, self._every_valid, first, count, self.kv.pieces[piece].values)


class ChunkStream(Pieces):
    """Query columns of a q_group, and what its q_blocks need of the chunk's keys and values.

    Its pieces are q_blocks: q_block b can be computed when b + 1 are ready.
    """

    def __init__(
        self,
        queries: QueryTiles,
        q: nl.NkiTensor,  # [H, S, d] HBM
        chunk: ChunkKeys,
        tile_valid: nl.NkiTensor,  # [128, q_tiles] uint8: real rows of the q_group, written later
    ) -> None:
        super().__init__(self._make())
        self.queries, self.chunk = queries, chunk
        self._q, self._tile_valid = q, tile_valid
        self._rows: dict[int, tuple[nl.NkiTensor, int]] = {}
        self._real: dict[int, nl.NkiTensor] = {}
        self._loads = 0
        self._loaded_pieces = chunk.made
        self.columns_ready = 0
        """q_blocks whose columns, and those of their keys, are made."""

    def _pieces_of(self, block: int) -> int:
        """Pieces of keys that a q_block and those before it need."""
        return -(-self.queries.seen_of_chunk(block, self.chunk.kv.count).stop // PIECE_TILES)

    def begin(self, blocks: int) -> None:
        """Start the loads of the first q_blocks."""
        group = self.queries.group
        for block in range(self._loads, min(blocks, group.num_blocks)):
            needed = self._pieces_of(block)
            self._load_keys(needed if self.queries.band.causal else min(needed, LOADED_AHEAD))
            self._load_queries(block)
            self._loads = block + 1

    def _load_keys(self, end: int) -> None:
        """Start the loads of pieces up to `end`."""
        for piece in range(self._loaded_pieces, end):
            self.chunk.load(piece)
            self._loaded_pieces = piece + 1

    def _load_queries(self, block: int) -> None:
        """The row tiles that a q_block is the first to need, all heads of them."""
        group = self.queries.group
        heads, width = group.num_heads, group.num_heads * self.queries.d
        begin = -(-block * Q_BLOCK_TILES // heads)
        end = min(-(-(block + 1) * Q_BLOCK_TILES // heads), len(group.row_tiles))
        if begin >= end:
            return
        rows = sbuf((PARTITIONS, (end - begin) * width), self._q.dtype)
        for tile, length in runs_of(group.row_tiles, begin, end - begin):
            first = (tile - begin) * width
            nisa.dma_copy(
                dst=rows[:, first : first + length * width],
                src=row_tile_view(self._q, group.first_head, heads, group.row_tiles[tile], length),
            )
        for tile in range(begin, end):
            self._rows[tile] = (rows, (tile - begin) * width)

    def _make(self) -> Iterator[int]:
        """Rows one q_block before columns, columns and values before their q_block."""
        group, chunk = self.queries.group, self.chunk
        if not self.queries.band.causal:
            yield from self._make_every_piece()
        zeroed = made = chunk.made
        for block in range(-1, group.num_blocks):
            needed = made
            if block >= 0:
                needed = max(made, self._pieces_of(block))
                for piece in range(made, needed):
                    chunk.write_keys(piece)
                    yield block
                self._write_columns(block)
                self.columns_ready = block + 1
                yield block
            if block + 1 < group.num_blocks:
                self.begin(block + 2 + LOADED_AHEAD)
                for piece in range(zeroed, self._pieces_of(block + 1)):
                    chunk.zero_padding(piece)
                    zeroed = piece + 1
                    yield max(block, 0)
                self._zero_padding(block + 1)
                yield max(block, 0)
            for piece in range(made, needed):
                chunk.write_values(piece)
                yield block
            made = needed
            chunk.made = max(chunk.made, made)
            yield block + 1

    def _make_every_piece(self) -> Iterator[int]:
        """Keys and values of the whole chunk."""
        chunk, count = self.chunk, self._pieces_of(0)
        for piece in range(chunk.made, count):
            self._load_keys(min(piece + LOADED_AHEAD, count))
            for make in (chunk.zero_padding, chunk.write_keys, chunk.write_values):
                make(piece)
                yield 0
            chunk.made = piece + 1

    def _zero_padding(self, block: int) -> None:
        """The rows of a q_block, padding made zero."""
        d, heads = self.queries.d, self.queries.group.num_heads
        first = block * Q_BLOCK_TILES
        end = first + self.queries.group.tiles_of(block)
        real = sbuf((PARTITIONS, (end - first) * d), self._q.dtype)
        t = first
        while t < end:
            rows, column = self._rows[t // heads]
            run = t
            while run < end and self._rows[run // heads][0] is rows:
                run += 1
            begin = column + t % heads * d
            nisa.select_reduce(
                dst=real[:, (t - first) * d : (run - first) * d],
                predicate=each_element(self._tile_valid, t, run - t, d),
                on_true=rows[:, begin : begin + (run - t) * d], on_false=0.0,
            )  # fmt: skip
            t = run
        self._real[block] = real

    def _write_columns(self, block: int) -> None:
        """Query columns of a q_block."""
        tiles = self.queries.group.tiles_of(block)
        transpose_features(self._real.pop(block), 0, tiles, self.queries.columns[block])
