"""Cached keys that the edge of a sliding window may cut: gathered token by token, or by blocks
from a pre-transposed cache (window_columns.py).

With a window of W tokens the chunk's row r sees the last W - 1 - r cached ones. They are cut into
key tiles of 128 that end where the chunk begins, whatever the block boundaries: tile -1 holds the
128 tokens before the chunk (band.py). So it is known at compile time which row tile sees which key
tile, and in what part, as within the chunk. The host names the slot of each token.

A *section* is some of these tiles, computed at once; while one is computed, the next is prepared.
All of the window is cut into sections while it is short. Of a long one only the first tiles are,
those that not every row of the share sees; the tokens after them are seen by all rows.
"""

from dataclasses import dataclass

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..cache.paged_cache import SegmentBlocks, add_head, rows_of_slots
from ..loading import element_bytes
from ..softmax import ScoreScale
from .band import Band
from .bounded import BoundedRows
from .exact_rows import ExactRows
from .first_key import FirstKey
from .prepared_segment import PreparedSegment
from .window_columns import WindowColumns

SECTION_BYTES = 32
"""Key tiles of a section times their element bytes per 128 features: two sections, each as rows, as
columns and as values, take 33 KiB of a partition."""

TILES_PER_FETCH = 4
"""Key tiles that one step gathers: GpSimd takes 2 us for them, and masks weights between steps."""

LEAST_SECTION_TILES = 32
"""Key tiles that are computed in sections even if all rows see them: W up to 4096."""


def window_tiles(
    window: int, num_rows: int, d: int, bytes_per_element: int
) -> tuple[int, int, int]:
    """Key tiles of a chunk's window that are computed in sections: first, end, how many at once.

    The sections are equal, so a few tiles may come before those that the first row sees.
    """
    band = Band(window)
    row_tiles = num_rows // PARTITIONS
    begin, end = -band.reach, 0
    if band.reach > max(LEAST_SECTION_TILES, row_tiles + 1):
        # Row tile i sees all of key tile j if i - j < edge.
        end = row_tiles - band.edge
    parts = (d + PARTITIONS - 1) // PARTITIONS
    longest = max(1, SECTION_BYTES // (bytes_per_element * parts))
    sections = max(1, (end - begin + longest - 1) // longest)
    tiles = (end - begin + sections - 1) // sections
    return end - sections * tiles, end, tiles


@dataclass
class WindowWalk(nl.NKIObject):
    """Where the next section begins that is read into one of the two sets of tiles."""

    tile: int


class WindowTokens(nl.NKIObject):
    """Reads key tiles before the chunk, one KV head at a time."""

    def __init__(
        self,
        k_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d] HBM
        v_cache: nl.NkiTensor,
        slots: nl.NkiTensor,  # [1, tokens] int32 HBM: those before the chunk, -1 absent
        window: int,
        num_rows: int,  # of the chunk
        dtype: str,  # of the keys and values that come out
        key_columns: WindowColumns | None,  # of a pre-transposed cache, instead of rows
        first_head: nl.NkiTensor | None,  # [128, 1] int32: the cache's head that is head 0
    ) -> None:
        self.first_head = first_head
        num_blocks, num_kv_heads, block_size, d = v_cache.shape
        self.slots = slots
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.d = d
        self.dtype = dtype
        self.k_dtype = k_cache.dtype
        self.v_dtype = v_cache.dtype
        self.key_columns = key_columns
        rows = num_blocks * num_kv_heads * block_size
        self.v_rows = v_cache.reshape((rows, d))
        self.k_rows = k_cache.reshape((rows, d))
        # Key tiles begin_tile .. end_tile - 1 are read, in sections of `tokens` tiles.
        begin_tile, end_tile, tokens = window_tiles(window, num_rows, d, element_bytes(dtype))
        self.begin_tile = begin_tile
        self.end_tile = end_tile
        self.tokens = tokens
        self.num_sections = 0
        if self.tokens > 0:
            self.num_sections = (self.end_tile - self.begin_tile) // self.tokens
        self.segment_size = self.tokens * PARTITIONS
        self.fetch_steps = (self.tokens + TILES_PER_FETCH - 1) // TILES_PER_FETCH
        self.run = 1
        self.runs = self.tokens
        # Some rows do not see an earlier section.
        self.seen_in_part = True
        assert self.first_token(self.begin_tile) >= 0, "slots must name every token of the window"

    def first_token(self, tile: int) -> int:
        """Where the tokens of a key tile begin among the slots."""
        return self.slots.shape[1] + tile * PARTITIONS

    def new_key_stage(self) -> list[nl.NkiTensor]:
        """Unwritten tiles for the keys of a section: rows [128, (tile, d)], or columns."""
        if self.key_columns is not None:
            return self.key_columns.keys.new_stage()
        shape = (PARTITIONS, self.tokens * self.d)
        return [nl.ndarray(shape, dtype=self.k_dtype, buffer=nl.sbuf)]

    def new_blocks(self) -> SegmentBlocks:
        """Unwritten slots of a section."""
        shape = (PARTITIONS, self.tokens)
        slots = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
        if self.key_columns is None:
            return SegmentBlocks(slots, None)
        columns = self.key_columns
        return SegmentBlocks(slots, columns.keys.new_blocks(), columns.new_seen())

    def new_walk(self, section: int) -> WindowWalk:
        """Begin at a section, go on with every second one."""
        return WindowWalk(self.begin_tile + section * self.tokens)

    def fetch_blocks(self, walk: WindowWalk, slots: SegmentBlocks) -> None:
        """Read the slots of a section, if there is one."""
        if walk.tile < self.end_tile:
            nisa.dma_copy(
                dst=slots.by_run,
                src=self.slots.ap(
                    [[1, PARTITIONS], [PARTITIONS, self.tokens]],
                    offset=self.first_token(walk.tile),
                ),
            )
            if self.key_columns is not None and slots.in_row is not None:
                self.key_columns.fetch_blocks(self.first_token(walk.tile), slots.in_row)

    def fetch_rows(
        self,
        walk: WindowWalk,
        slots: SegmentBlocks,  # from fetch_blocks
        kv_head: int,
        k_stage: list[nl.NkiTensor],  # from new_key_stage, result
        v_stage: nl.NkiTensor,  # [128, tiles * d] SBUF, result
        part: int,  # TILES_PER_FETCH tiles
    ) -> None:
        """Gather part of a section, if there is one: a token per partition, or blocks of keys."""
        if walk.tile >= self.end_tile:
            return
        first = part * TILES_PER_FETCH
        last = min(first + TILES_PER_FETCH, self.tokens)
        own = slots.by_run[:, first:last]
        rows = rows_of_slots(own, self.block_size, self.num_kv_heads)
        if self.first_head is not None:
            add_head(rows, self.first_head, self.block_size)
        if self.key_columns is not None and slots.in_row is not None and slots.seen is not None:
            if part == 0:
                self.key_columns.fetch_seen(self.first_token(walk.tile), slots.seen)
            keys = self.key_columns.keys
            begin_block = part * keys.blocks // self.fetch_steps
            end_block = (part + 1) * keys.blocks // self.fetch_steps
            keys.gather(slots.in_row, kv_head, k_stage, begin_block, end_block - begin_block)
        for i in range(last - first):
            if self.key_columns is None:
                self.gather_tile(self.k_rows, rows[:, i : i + 1], kv_head, k_stage[0], first + i)
            self.gather_tile(self.v_rows, rows[:, i : i + 1], kv_head, v_stage, first + i)

    def gather_tile(
        self,
        cache_rows: nl.NkiTensor,  # [rows, d] HBM
        rows: nl.NkiTensor,  # [128, 1] int32: the row of each token, for KV head 0
        kv_head: int,
        stage: nl.NkiTensor,  # [128, tiles * d] SBUF, result
        tile: int,
    ) -> None:
        """Gather a key tile, a token per partition."""
        nisa.dma_copy(
            dst=stage[:, tile * self.d : (tile + 1) * self.d],
            src=cache_rows.ap(
                [[self.d, PARTITIONS], [1, self.d]], offset=kv_head * self.block_size * self.d,
                vector_offset=rows, indirect_dim=0,
            ),
            oob_mode=nisa.oob_mode.skip,
        )  # fmt: skip

    def advance_block(self, walk: WindowWalk) -> None:
        """Move on to the next section of these tiles."""
        walk.tile = walk.tile + 2 * self.tokens


class WindowSections(nl.NKIObject):
    """The sections of a window's edge, in turn in two sets of tiles."""

    def __init__(
        self,
        rows: BoundedRows | ExactRows,
        tokens: WindowTokens,
        kv_head: int,
        first_key: FirstKey | None,
    ) -> None:
        self.rows = rows
        self.tokens = tokens
        self.end_tile = tokens.end_tile
        self.num_sections = tokens.num_sections
        self.segments: list[PreparedSegment] = []
        # Walks of their own: the first gathers of both sets are issued in any order.
        for i in range(min(2, self.num_sections)):
            walk = tokens.new_walk(i)
            self.segments.append(PreparedSegment(rows, tokens, walk, kv_head, False, first_key))

    def attend(self, scale: ScoreScale) -> None:
        """Every block over the sections, of which the first is prepared."""
        rows = self.rows
        for section in range(self.num_sections):
            current = self.segments[section % 2]
            tile = self.tokens.begin_tile + section * self.tokens.tokens
            rows.beside = []
            following = self.segments[(section + 1) % len(self.segments)]
            if section + 1 < self.num_sections:
                following.done = 0
                rows.beside = [[following]]
            rows.attend_segment(
                current.keys, current.values, current.mask, self.tokens.tokens, scale, tile
            )
            if section + 1 < self.num_sections:
                following.finish()
        rows.drain()
