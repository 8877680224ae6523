"""The cached tokens before a chunk: what a kernel prepares once, and the stream of each share."""

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..cache.paged_cache import PagedSegments
from ..loading import broadcast_row, element_bytes
from ..softmax import ScoreScale, cached_scale
from ..tile_schedule import Share
from .bounded import BoundedRows
from .chunk_stream import ChunkKeys
from .exact_rows import ExactRows
from .first_key import FirstKey
from .prior_stream import MANY_BLOCKS, PriorStream
from .share_tiles import num_blocks_of
from .window_columns import WindowColumns
from .window_stream import WindowTokens, window_tiles

TAIL_SEGMENT = 512
"""Tokens of the segments that hold what the whole segments leave of the prior."""

HALF_SEGMENT = 2 * TAIL_SEGMENT
"""Tokens of longer ones, of which the exact softmax with many rows takes as many as it can."""

LONG_SHARE = 16
"""Row tiles of a share above which one whole segment is computed per trip of the exact softmax."""

WINDOW_SEGMENT = 2048
"""Most tokens of a segment between a window's edge and the chunk."""


class PagedPrior(nl.NKIObject):
    """Segments of a prior in a paged cache, and the scales of its keys and values."""

    def __init__(
        self,
        k_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d] HBM
        v_cache: nl.NkiTensor,
        block_table: nl.NkiTensor,  # [1, blocks] int32 HBM
        prior_tokens: nl.NkiTensor,  # [1, 1] int32 HBM
        window_slots: nl.NkiTensor | None,  # [1, tokens] int32 HBM, with a window
        kv_segment_size: int,
        window: int | None,
        num_rows: int,  # of the chunk
        dtype: str,  # of the chunk
        k_scales: nl.NkiTensor | None,  # [1, KV] fp32 HBM
        v_scales: nl.NkiTensor | None,  # [1, KV] fp32 HBM
        k_pre_transposed: bool,
        first_kv_head: nl.NkiTensor | None,  # [1, 1] int32 HBM: the cache's head that is head 0
        window_blocks: nl.NkiTensor | None,  # [1, blocks] int32 HBM, with a window and
        window_seen: nl.NkiTensor | None,  # [1, tokens] uint8 HBM, k_pre_transposed
    ) -> None:
        self.first_head: nl.NkiTensor | None = None
        if first_kv_head is not None:
            self.first_head = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
            nisa.dma_copy(dst=self.first_head, src=first_kv_head.ap([[0, PARTITIONS], [1, 1]]))
        self.k_cache = k_cache
        self.v_cache = v_cache
        self.block_table = block_table
        self.dtype = dtype
        self.k_pre_transposed = k_pre_transposed
        self.kv_segment_size = kv_segment_size
        self.prior_count = broadcast_row(prior_tokens)
        self.k_factor: nl.NkiTensor | None = None
        self.v_factor: nl.NkiTensor | None = None
        if k_scales is not None:
            self.k_factor = broadcast_row(k_scales)
        if v_scales is not None:
            self.v_factor = broadcast_row(v_scales)
        self.window: WindowTokens | None = None
        self.reach = 0
        self.tail: PagedSegments | None = None
        # Segments of the whole prior by their size: made when a share first asks for them.
        self.whole: list[PagedSegments] = []
        if window is None:
            self.tail = self.segments_of(min(TAIL_SEGMENT, kv_segment_size))
        elif window > 1:
            assert window_slots is not None, "a window needs the slots of its tokens"
            columns: WindowColumns | None = None
            if k_pre_transposed:
                assert window_blocks is not None, "key columns need the blocks of a window"
                assert window_seen is not None, "key columns need the tokens of a window"
                d = v_cache.shape[3]
                _, _, tiles = window_tiles(window, num_rows, d, element_bytes(dtype))
                columns = WindowColumns(
                    k_cache, window_blocks, window_seen, prior_tokens, tiles * PARTITIONS,
                    self.first_head,
                )  # fmt: skip
            self.window = WindowTokens(
                k_cache, v_cache, window_slots, window, num_rows, dtype, columns, self.first_head
            )
            if self.window.end_tile < 0:
                self.tail = self.segments_of(min(WINDOW_SEGMENT, kv_segment_size))

    def segments_of(self, size: int) -> PagedSegments:
        """The prior in segments of a size."""
        return PagedSegments(
            self.k_cache, self.v_cache, self.block_table, size, self.dtype, self.k_pre_transposed,
            self.first_head,
        )  # fmt: skip

    def whole_segments(self, size: int) -> PagedSegments:
        """The same, one object per size."""
        for each in self.whole:
            if each.segment_size == size:
                return each
        self.whole.append(self.segments_of(size))
        return self.whole[len(self.whole) - 1]

    def stream(
        self, rows: BoundedRows | ExactRows, keys: ChunkKeys, num_tokens: nl.NkiTensor
    ) -> PriorStream | None:
        """The prior of a share; None: the share sees nothing of it.

        `keys` are those of the chunk, of which `num_tokens` [128, 1] fp32 are real.
        """
        tiles = rows.tiles
        kv_head = keys.kv_head
        first_key: FirstKey | None = None
        # The chunk's key has no k_scale: with one, absent keys are masked instead.
        has_chunk_form = self.k_cache.dtype == self.dtype and self.k_factor is None
        if rows.is_exact and has_chunk_form and not self.k_pre_transposed:
            first_key = FirstKey(keys.k, kv_head, num_tokens)
        if self.window is not None or self.tail is None:
            if not tiles.band.sees(tiles.row_tile(0) + 1):
                return None
            return PriorStream(
                rows, None, True, None, self.tail, self.window, self.prior_count, kv_head, first_key
            )
        whole = None
        half = None
        in_pairs = True
        if self.kv_segment_size > TAIL_SEGMENT:
            size, num_bodies = whole_segment_size(
                self.kv_segment_size, self.v_cache.shape[2], tiles.share, rows.is_exact,
                element_bytes(self.dtype) * len(tiles.queries),
            )  # fmt: skip
            whole = self.whole_segments(size)
            in_pairs = num_bodies > 1
            if rows.is_exact and takes_half(
                size, tiles.share, element_bytes(self.dtype) * len(tiles.queries)
            ):
                half = self.whole_segments(HALF_SEGMENT)
        return PriorStream(
            rows, whole, in_pairs, half, self.tail, None, self.prior_count, kv_head, first_key
        )

    def score_scale(self, kv_head: int, scale: float) -> ScoreScale:
        """Factor of scores against the cached keys of a KV head."""
        if self.k_factor is None:
            return ScoreScale(scale, -scale)
        return cached_scale(self.k_factor[:, kv_head : kv_head + 1], scale)

    def value_scale(self, kv_head: int) -> nl.NkiTensor | None:
        """Factor of the cached values of a KV head, [128, 1] fp32; None is 1."""
        if self.v_factor is None:
            return None
        return self.v_factor[:, kv_head : kv_head + 1]


def whole_segment_size(
    kv_segment_size: int, block_size: int, share: Share, is_exact: bool, key_bytes: int
) -> tuple[int, int]:
    """Tokens of a whole segment of a share, and how many of them are in the bodies of its loops.

    Half of kv_segment_size with many blocks of queries, as a trip computes two, and for long keys
    (key_bytes: bytes of an element times 128 features), of which SBUF holds fewer. The exact
    softmax takes as long as it can, as its steps do; one per trip with many rows, where its program
    would be too long.
    """
    half = kv_segment_size // 2
    size = kv_segment_size
    if (key_bytes > 2 or (not is_exact and num_blocks_of(share) > MANY_BLOCKS)) and (
        half % PARTITIONS == 0 and half % block_size == 0
    ):
        size = half
    if is_exact and len(share.row_tiles) > LONG_SHARE:
        return size, 1
    return size, 3


def takes_half(whole_size: int, share: Share, key_bytes: int) -> bool:
    """Whether the exact softmax of a share takes segments of HALF_SEGMENT between the others.

    `key_bytes` as above: SBUF has no room for those of long keys.
    """
    many = num_blocks_of(share) > MANY_BLOCKS
    return many and key_bytes == 2 and whole_size % HALF_SEGMENT == 0
