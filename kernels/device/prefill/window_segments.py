"""Cached keys that the edge of a sliding window may cut: gathered token by token, or by blocks
from a pre-transposed cache.

With a window of W tokens the chunk's row r sees the last W - 1 - r cached ones. They are cut into
kv_tiles of 128 that end where the chunk begins, whatever the block boundaries: tile -1 holds the
128 tokens before the chunk (band.py). So it is known when the kernel is traced which q_tile sees
which kv_tile, and in what part, as within the chunk. The host names the slot of each token.

Some of these tiles are computed at once, as a segment; while one is computed, the next is prepared.
All of the window is cut into such segments while it is short. Of a long one only the first tiles
are, those that not every row of the q_group sees; the tokens after them are seen by all rows.

Pre-transposed blocks do not end where the chunk begins: they are loaded whole, and a DMA moves the
columns of the segment, which begin prior_tokens % block_size columns inside, to a fixed place.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..tile_schedule import feature_parts
from .band import Band
from .key_columns import StagedColumns
from .key_source import KeyRows, KeySource, Stage, StagedKeys, StageOptions
from .on_chip import Columns, sbuf
from .paged_segments import PagedCache

SEGMENT_BYTES = 32
"""kv_tiles of a segment times their element bytes per 128 features: two segments, each as rows, as
columns and as values, take 33 KiB of a partition."""

TILES_PER_FETCH = 4
"""kv_tiles that a portion gathers: GpSimd takes 2 us for them, and masks weights in between."""

LEAST_TILES = 32
"""kv_tiles that are computed this way even if all rows see them: W up to 4096."""


def window_tiles(
    window: int, num_rows: int, d: int, bytes_per_element: int, block_size: int
) -> tuple[int, int, int]:
    """kv_tiles of a chunk's window that are computed here: first, end, how many at once.

    The segments are equal, and as long as a block at least, so a few tiles may come before those
    that the first row sees.
    """
    band = Band(window)
    row_tiles = num_rows // PARTITIONS
    begin, end = -band.reach, 0
    if band.reach > max(LEAST_TILES, row_tiles + 1):
        # Row tile i sees all of kv_tile j if i - j < edge.
        end = row_tiles - band.edge
    longest = max(1, SEGMENT_BYTES // (bytes_per_element * feature_parts(d)))
    segments = max(1, -(-(end - begin) // longest))
    per_block = max(1, block_size // PARTITIONS)
    tiles = -(-(end - begin) // (segments * per_block)) * per_block
    return end - segments * tiles, end, tiles


@dataclass(frozen=True)
class WindowTokens:
    """Where a window's tokens lie, in HBM (window_plan.py)."""

    slots: nl.NkiTensor
    """[1, tokens] int32: those before the chunk, -1 absent."""
    blocks: nl.NkiTensor | None
    """[1, blocks] int32 from the first token's on; for a pre-transposed cache."""
    seen: nl.NkiTensor | None
    """[1, tokens] uint8: which of them exist; for a pre-transposed cache."""


class WindowSegments(KeySource):
    """The kv_tiles before the chunk that a window cuts."""

    def __init__(
        self,
        cache: PagedCache,
        tokens: WindowTokens,
        tiles: tuple[int, int, int],  # from window_tiles
        prior_tokens: nl.NkiTensor,  # [1, 1] int32 HBM
    ) -> None:
        self.cache, self.tokens = cache, tokens
        self.begin_tile, self.end_tile, self.tiles = tiles
        num_blocks, num_kv_heads, self.block_size, self.value_dim = cache.v_cache.shape
        self.d = cache.key_dim
        self.num_kv_heads = num_kv_heads
        rows = num_blocks * num_kv_heads * self.block_size
        self.v_rows = cache.v_cache.reshape((rows, self.value_dim))
        self.k_rows = cache.k_cache.reshape((rows, self.d))
        self.lowest_row = sbuf((PARTITIONS, self.tiles), nl.int32)
        nisa.memset(dst=self.lowest_row, value=0)
        self.first_column: nisa.VirtualRegister | None = None
        if cache.k_pre_transposed:
            inside = sbuf((1, 1), nl.int32)
            nisa.dma_copy(dst=inside, src=prior_tokens)
            if self.block_size > PARTITIONS:
                nisa.tensor_scalar(
                    dst=inside, data=inside, op0=nl.add, operand0=self.begin_tile * PARTITIONS
                )
            nisa.tensor_scalar(
                dst=inside, data=inside, op0=nl.bitwise_and, operand0=self.block_size - 1
            )
            self.first_column = nisa.register_alloc()
            nisa.register_load(self.first_column, inside)
        assert self.first_token(self.begin_tile) >= 0, "slots must name every token of the window"

    @property
    def num_segments(self) -> int:
        """How many segments there are."""
        return (self.end_tile - self.begin_tile) // self.tiles

    def first_token(self, tile: int) -> int:
        """Where the tokens of a kv_tile begin among the slots."""
        first: int = self.tokens.slots.shape[1] + tile * PARTITIONS
        return first

    def stage(self, kv_head: int, options: StageOptions) -> "WindowStage":
        """New staged rows."""
        return WindowStage(self, kv_head, options)

    def rows_of(self, slots: nl.NkiTensor, kv_head: int) -> nl.NkiTensor:
        """Cache row of each slot of a tile for a KV head, int32; 0 for -1.

        row = slot + (slot - slot % block_size) * (KV - 1) + kv_head * block_size.
        """
        start, rows = sbuf(slots.shape, nl.int32), sbuf(slots.shape, nl.int32)
        nisa.tensor_scalar(dst=start, data=slots, op0=nl.bitwise_and, operand0=-self.block_size)
        nisa.memset(dst=rows, value=self.num_kv_heads - 1)
        nisa.tensor_tensor(dst=rows, data1=start, data2=rows, op=nl.multiply)
        nisa.tensor_tensor(dst=rows, data1=rows, data2=slots, op=nl.add)
        if kv_head:
            nisa.memset(dst=start, value=kv_head * self.block_size)
            nisa.tensor_tensor(dst=rows, data1=rows, data2=start, op=nl.add)
        nisa.tensor_tensor(
            dst=rows, data1=rows, data2=self.lowest_row[:, 0 : slots.shape[1]], op=nl.maximum,
            engine=nisa.engine.gpsimd,
        )  # fmt: skip
        return rows


class WindowStage(Stage):
    """One KV head's segments of a window: a token per partition, or blocks of keys."""

    def __init__(self, source: WindowSegments, kv_head: int, options: StageOptions) -> None:
        cache, tiles = source.cache, source.tiles
        super().__init__(tiles, tiles, source.value_dim, cache.v_cache.dtype, options)
        self._source, self._kv_head = source, kv_head
        self._tile = source.begin_tile
        self._rows: KeyRows | None = None
        self._columns: _ShiftedColumns | None = None
        if cache.k_pre_transposed:
            self._columns = _ShiftedColumns(source, kv_head)
            self.keys = self._columns
        else:
            rows = sbuf((PARTITIONS, tiles * source.d), cache.k_cache.dtype)
            self._rows = KeyRows(rows, options.dtype, self.facts, options.first_key)
            self.keys = self._rows

    def fetch(self) -> Iterator[None]:
        """Read the slots, then gather a few kv_tiles at a time; nothing after the last segment."""
        source, tile = self._source, self._tile
        if tile >= source.end_tile:
            return
        self._tile += source.tiles
        nisa.dma_copy(
            dst=self.facts.blocks,
            src=source.tokens.slots.ap(
                [[1, PARTITIONS], [PARTITIONS, source.tiles]], offset=source.first_token(tile)
            ),
        )
        yield
        for first in range(0, source.tiles, TILES_PER_FETCH):
            end = min(first + TILES_PER_FETCH, source.tiles)
            rows = source.rows_of(self.facts.blocks[:, first:end], self._kv_head)
            if self._columns is not None and first == 0:
                self._columns.fetch(source.first_token(tile))
            for i in range(first, end):
                row = rows[:, i - first : i - first + 1]
                if self._rows is not None:
                    self._gather(source.k_rows, row, self._rows.rows, i)
                self._gather(source.v_rows, row, self.values, i)
            yield

    def _gather(
        self, cache_rows: nl.NkiTensor, row: nl.NkiTensor, stage: nl.NkiTensor, tile: int
    ) -> None:
        """Gather a kv_tile, a token per partition."""
        d = cache_rows.shape[1]
        nisa.dma_copy(
            dst=stage[:, tile * d : (tile + 1) * d],
            src=cache_rows.ap(
                [[d, PARTITIONS], [1, d]], offset=0, vector_offset=row, indirect_dim=0
            ),
        )  # fmt: skip

    def mark(self) -> None:
        """Tokens that have a slot."""
        # The sign alone: a slot may have more than the 24 bits that fp32 compares exactly.
        slots = self.facts.blocks
        sign = sbuf(slots.shape, nl.int32)
        nisa.tensor_scalar(dst=sign, data=slots, op0=nl.bitwise_and, operand0=-(2**31))
        nisa.tensor_scalar(dst=self.facts.present, data=sign, op0=nl.greater_equal, operand0=0.0)
        if self._rows is not None:
            # Some rows do not see an earlier segment's keys, so none of them may stay.
            self._rows.begin()


class _ShiftedColumns(StagedKeys):
    """Key columns of a window's segment, in token order."""

    def __init__(self, source: WindowSegments, kv_head: int) -> None:
        self._source = source
        self._width = source.tiles * PARTITIONS
        # One block more than the segment has: its first token is inside of one.
        num_blocks = self._width // source.block_size + 1
        self._staged = StagedColumns(source.cache.k_cache, kv_head, num_blocks)
        self._shifted = [
            sbuf((part.shape[0], self._width), part.dtype) for part in self._staged.columns
        ]
        self._seen = sbuf((PARTITIONS, self._width), nl.uint8)

    def begin(self) -> None:
        """Absent keys become zero."""

    def fetch(self, first_token: int) -> None:
        """Load the blocks of the segment that begins at a token, and what exists of it."""
        tokens = self._source.tokens
        assert tokens.blocks is not None, "key columns need the blocks of a window"
        assert tokens.seen is not None, "key columns need the tokens of a window"
        num = self._staged.blocks.shape[1]
        nisa.dma_copy(
            dst=self._staged.blocks,
            src=tokens.blocks.ap(
                [[num, 1], [1, num]], offset=first_token // self._source.block_size
            ),
        )
        nisa.dma_copy(
            dst=self._seen,
            src=tokens.seen.ap([[0, PARTITIONS], [1, self._width]], offset=first_token),
        )
        self._staged.hold_in_range()
        self._staged.gather(0, num)
        for part, shifted in zip(self._staged.columns, self._shifted, strict=True):
            height, width = part.shape
            nisa.dma_copy(
                dst=shifted,
                src=part.ap(
                    [[width, height], [1, self._width]], offset=0,
                    scalar_offset=self._source.first_column, indirect_dim=1,
                ),
            )  # fmt: skip

    def mark(self) -> None:
        """The host has said which tokens exist."""

    def prepare(self, first: int, count: int) -> bool:
        """Absent keys are replaced on the way into columns."""
        return False

    def write_columns(self, first: int, count: int, columns: Columns) -> None:
        """Key columns of some kv_tiles, zero where no token exists."""
        own = slice(first * PARTITIONS, (first + count) * PARTITIONS)
        for shifted, part in zip(self._shifted, columns, strict=True):
            nisa.select_reduce(
                dst=part, predicate=self._seen[0 : shifted.shape[0], own],
                on_true=shifted[:, own], on_false=0.0,
            )  # fmt: skip
