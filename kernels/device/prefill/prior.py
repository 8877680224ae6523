"""The cached tokens before a chunk: one device loop of long trips, one of short ones.

A trip is self-contained but for SBUF: the rows of its first segment are gathered in the trip before
(a device loop waits for all engines at its edge, and for DMAs). In the trip each segment is made
beside the iterations of the one before, its rows staged while others are computed:

    DMA | gather 1 |              | gather 2 |            | gather 0 of the next trip |
    DVE | make 0   |              | make 1   |
    PE  |    q_blocks x segment 0            | q_blocks x segment 1 ...
        time ->

Several q_groups take turns: segment 0 of each, segment 1 of each. What whole long trips leave of
the prior follows in short trips, the last one partly used. With a window the
kv_tiles that its edge cuts come first, unrolled (window_segments.py), and then, from where all rows
see all keys, the second kind of loop.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ...backend import nisa, nl
from ...sizes import LONGEST_SHORT_TRIP, PARTITIONS, SHORT_SEGMENT, TABLE_PADDING
from ..loading import broadcast_row, element_bytes
from ..softmax import ScoreScale, cached_scale
from ..tile_schedule import feature_parts
from .background import Pieces
from .first_key import FirstKey
from .key_source import KeySource, Stage, StageOptions
from .kv_tiles import KvPiece, KvTiles, new_pieces
from .on_chip import sbuf
from .paged_segments import PagedCache, PagedSegments, aligned_down, load_number
from .query_tiles import QueryTiles
from .softmax_base import Softmax
from .window_segments import WindowSegments, WindowTokens, window_tiles

LONGEST_SEGMENT = 1024
"""Most tokens of a segment of 16-bit keys with up to 128 features; others have SHORT_SEGMENT."""

SHORT_TRIP_BLOCKS = LONGEST_SHORT_TRIP
"""q_blocks times tokens of a short trip: its 64 iterations take twice as long as its edges."""

LONG_TRIP = 8
"""Short trips' worth of tokens of a long one."""

GATHER_ITERATIONS = 8
"""Iterations of the softmax, at most, until a segment that was just gathered is made."""


@dataclass(frozen=True)
class TripSizes:
    """Tokens of a segment, and segments of a trip of both loops."""

    segment: int
    short: int
    long: int
    """0: there are no long trips."""


def trip_sizes(
    num_blocks: int, kv_segment_size: int, table_tokens: int, key_bytes: int, has_long: bool
) -> TripSizes:
    """For so many q_blocks; key_bytes: bytes of an element times 128 features."""
    longest = LONGEST_SEGMENT if key_bytes == 2 else SHORT_SEGMENT
    few = 2 if num_blocks <= 2 else 1
    segment = power_of_two(min(few * longest, kv_segment_size))
    short = segment
    while 2 * short * num_blocks <= SHORT_TRIP_BLOCKS and short < table_tokens:
        short *= 2
    long = short
    while has_long and long < LONG_TRIP * short and 2 * long <= table_tokens:
        long *= 2
    return TripSizes(segment, short // segment, long // segment if long > short else 0)


def power_of_two(tokens: int) -> int:
    """The largest power of two times 128 up to `tokens`: a partition holds one run of a block."""
    size = PARTITIONS
    while 2 * size <= tokens:
        size *= 2
    return size


@dataclass
class _Item:
    """A q_group against its next segment."""

    queries: QueryTiles
    stage: Stage
    scale: ScoreScale
    first_tile: int | None


@dataclass(frozen=True)
class PriorArguments:
    """What a kernel is given of the prior, in HBM."""

    cache: PagedCache
    prior_tokens: nl.NkiTensor
    """[1, 1] int32."""
    kv_segment_size: int
    k_scales: nl.NkiTensor | None
    """[1, KV] fp32."""
    v_scales: nl.NkiTensor | None
    """[1, KV] fp32."""
    window: WindowTokens | None


class Prior:
    """What all passes share: constants of the sources, counts and scales."""

    def __init__(
        self,
        given: PriorArguments,
        q: nl.NkiTensor,  # [H, S, d] HBM
        k: nl.NkiTensor | None,  # [KV, S, d] HBM, the chunk's
        window: int | None,
    ) -> None:
        _, num_rows, d = q.shape
        self.given, self.cache, self.k = given, given.cache, k
        self.dtype: str = q.dtype
        self.count = broadcast_row(given.prior_tokens)
        self._k_factors = None if given.k_scales is None else broadcast_row(given.k_scales)
        self._v_factors = None if given.v_scales is None else broadcast_row(given.v_scales)
        self._sources: dict[int, PagedSegments] = {}
        self.key_bytes = element_bytes(self.dtype) * feature_parts(d)
        self.window: WindowSegments | None = None
        self.reach_is_short = window is not None
        """Whether a window's tokens are all computed in its own segments, or there are none."""
        if window is not None and window > 1:
            assert given.window is not None, "a window needs the slots of its tokens"
            tiles = window_tiles(
                window, num_rows, d, element_bytes(self.dtype), given.cache.block_size
            )
            self.window = WindowSegments(given.cache, given.window, tiles, given.prior_tokens)
            self.reach_is_short = self.window.end_tile == 0

    @property
    def table_tokens(self) -> int:
        """Tokens that the block table names, without what it is padded with."""
        return int(self.cache.block_table.shape[1]) * self.cache.block_size - TABLE_PADDING

    def source(self, size: int) -> PagedSegments:
        """Segments of a size."""
        if size not in self._sources:
            self._sources[size] = PagedSegments(self.cache, size)
        return self._sources[size]

    def score_scale(self, kv_head: int, scale: float) -> ScoreScale:
        """Factor of scores against the cached keys of a KV head."""
        if self._k_factors is None:
            return ScoreScale(scale, -scale)
        return cached_scale(self._k_factors[:, kv_head : kv_head + 1], scale)

    def value_scale(self, kv_head: int) -> nl.NkiTensor | None:
        """Factor of the cached values of a KV head, [128, 1] fp32; None is 1."""
        if self._v_factors is None:
            return None
        return self._v_factors[:, kv_head : kv_head + 1]

    @property
    def has_chunk_form(self) -> bool:
        """Whether a key of the chunk can stand in for a cached one."""
        return (
            self.k is not None
            and self.cache.k_cache.dtype == self.dtype
            and self._k_factors is None
            and not self.cache.k_pre_transposed
        )


class _Segments:
    """Segments of one source for all q_groups of a pass, and two sets of kv_tiles."""

    def __init__(
        self, softmax: Softmax, source: KeySource, like: QueryTiles, has_mask: bool
    ) -> None:
        self._softmax, self._like = softmax, like
        self._has_mask = has_mask
        self._tiles = source.tiles
        self._sets: list[tuple[list[KvPiece], nl.NkiTensor | None]] = []

    def _set(self, index: int) -> tuple[list[KvPiece], nl.NkiTensor | None]:
        """Tiles for a segment; every second one takes the same."""
        like = self._like
        while len(self._sets) <= index % 2:
            mask = None
            if self._has_mask:
                mask = sbuf((1, self._tiles * PARTITIONS), nl.bfloat16)
            self._sets.append((new_pieces(self._tiles, like.d, like.value_dim, like.dtype), mask))
        return self._sets[index % 2]

    def allocate(self, num_items: int) -> None:
        """Make the tiles, outside of a loop."""
        for index in range(min(2, num_items)):
            self._set(index)

    def attend(self, items: list[_Item]) -> None:
        """Each q_group over its segment; the next one is made beside."""
        softmax = self._softmax
        kvs = []
        for index, item in enumerate(items):
            pieces, mask = self._set(index)
            kv = KvTiles(
                pieces, self._like.value_dim, self._tiles, item.scale, item.first_tile, mask
            )
            kv.making = Pieces(self._make(item, kv))
            kvs.append(kv)
        for index, (item, kv) in enumerate(zip(items, kvs, strict=True)):
            assert kv.making is not None
            work: list[Iterator[object]] = [kv.making]
            if index + 1 < len(items):
                making = kvs[index + 1].making
                assert making is not None
                if items[index + 1].stage is item.stage:
                    work.append(_wait(2 if softmax.is_exact else GATHER_ITERATIONS))
                work.append(making)
            queue = softmax.background.add(*work)
            softmax.attend_blocks(item.queries, range(item.queries.group.num_blocks), kv, True)
            softmax.background.drop(queue)
            for _ in kv.making:
                pass

    def _make(self, item: _Item, kv: KvTiles) -> Iterator[int]:
        """Make a segment once nothing in flight reads the tiles any more."""
        self._softmax.release(kv)
        yield from item.stage.make(kv)


def _wait(iterations: int) -> Iterator[None]:
    """Nothing, so often."""
    for _ in range(iterations):
        yield


class _Walked:
    """The segments that device loops walk over: a stage for each q_group, and shared tiles."""

    def __init__(self, parent: "PriorPass", sizes: TripSizes) -> None:
        self._parent = parent
        source = parent.prior.source(sizes.segment)
        self._segment_size = sizes.segment
        self._segments = parent.segments(source)
        self._segments.allocate(max(sizes.short, sizes.long) * len(parent.groups))
        self.stages = [
            source.stage(queries.group.kv_head, parent.options(queries))
            for queries in parent.groups
        ]

    def begin(self, counts: nl.NkiTensor) -> None:
        """Put every q_group's walk at the first segment."""
        for stage in self.stages:
            stage.begin(counts, None)

    def begin_within(
        self, counts: nl.NkiTensor, first_block: nl.NkiTensor, skipped: nl.NkiTensor
    ) -> None:
        """Put every q_group's walk at a block, without the first `skipped` [128, 1] tokens."""
        for stage in self.stages:
            stage.begin(counts, first_block)
            stage.walk.skipped = sbuf((PARTITIONS, 1))
            nisa.tensor_copy(dst=stage.walk.skipped, src=skipped)

    def run(
        self, per_trip: int, start: nisa.VirtualRegister | int, end: nisa.VirtualRegister
    ) -> None:
        """Trips of so many segments over the tokens from `start` to `end`.

        Each q_group's first segment is gathered, by begin() or in the trip before.
        """
        parent = self._parent

        def trip(i: nisa.VirtualRegister) -> None:
            items = [
                _Item(queries, stage, scale, None)
                for _ in range(per_trip)
                for queries, stage, scale in zip(
                    parent.groups, self.stages, parent.scales, strict=True
                )
            ]
            self._segments.attend(items)
            parent.softmax.drain()

        nl.fori_loop(start, end, trip, step=per_trip * self._segment_size)


class PriorPass:
    """All of the prior of the q_groups of a pass."""

    def __init__(
        self,
        softmax: Softmax,
        prior: Prior,
        groups: list[QueryTiles],
        num_tokens: nl.NkiTensor,  # [128, 1] fp32: real rows of the chunk
    ) -> None:
        self.softmax, self.prior, self.groups = softmax, prior, groups
        self._num_tokens = num_tokens
        self.scales = [
            prior.score_scale(each.group.kv_head, softmax.numbers.of_products) for each in groups
        ]
        self._first_keys: dict[int, FirstKey] = {}
        # Loop bounds in tokens: nothing is done where they are not loaded.
        self._start, self._end = nisa.register_alloc(0), nisa.register_alloc(0)
        self._sizes: TripSizes | None = None
        self._walked: _Walked | None = None
        self._window: _Segments | None = None
        self._window_stages: list[Stage] = []
        window = prior.window
        if window is not None:
            self._window = self.segments(window)
            self._window_stages = [
                window.stage(each.group.kv_head, self.options(each)) for each in groups
            ]
        if not prior.reach_is_short:
            num_blocks = sum(each.group.num_blocks for each in groups)
            self._sizes = trip_sizes(
                num_blocks,
                prior.given.kv_segment_size,
                prior.table_tokens,
                prior.key_bytes,
                window is None,
            )
            self._walked = _Walked(self, self._sizes)

    def options(self, queries: QueryTiles) -> StageOptions:
        """How segments are made ready for a q_group."""
        first_key = None
        if self.softmax.is_exact and self.prior.has_chunk_form and self.prior.k is not None:
            kv_head = queries.group.kv_head
            if kv_head not in self._first_keys:
                self._first_keys[kv_head] = FirstKey(self.prior.k, kv_head, self._num_tokens)
            first_key = self._first_keys[kv_head]
        return StageOptions(self.prior.dtype, first_key)

    def segments(self, source: KeySource) -> _Segments:
        """Tiles for segments of a source."""
        has_mask = self.softmax.is_exact and not self.prior.has_chunk_form
        return _Segments(self.softmax, source, self.groups[0], has_mask)

    def begin(self) -> Iterator[None]:
        """Start the first gathers, in portions; loop bounds in registers."""
        stages = list(self._window_stages)
        if self._walked is not None and self._sizes is not None:
            self._begin_walk(self._walked, self._sizes)
            stages += self._walked.stages
        for stage in stages:
            stage.keys.begin()
            yield
            yield from stage.fetch()

    def _begin_walk(self, walked: _Walked, sizes: TripSizes) -> None:
        """Where the loops begin and end: a window's at the first kv_tile that all rows see."""
        prior, count = self.prior, self.prior.count
        load_number(self._end, count)
        if prior.window is None:
            if sizes.long:
                _, token = aligned_down(count, sizes.long * sizes.segment)
                load_number(self._start, token)
            walked.begin(count)
            return
        # In the middle of a segment perhaps.
        position = sbuf((PARTITIONS, 1))
        nisa.tensor_scalar(
            dst=position, data=count, op0=nl.add,
            operand0=float(prior.window.end_tile * PARTITIONS),
        )  # fmt: skip
        index, token = aligned_down(position, sizes.segment)
        rest, first_block = sbuf((PARTITIONS, 1)), sbuf((1, 1), nl.int32)
        nisa.tensor_tensor(dst=rest, data1=count, data2=token, op=nl.subtract)
        nisa.tensor_scalar(
            dst=first_block, data=index[0:1, :], op0=nl.multiply,
            operand0=float(sizes.segment // prior.cache.block_size),
        )  # fmt: skip
        skipped = sbuf((PARTITIONS, 1))
        nisa.tensor_tensor(dst=skipped, data1=position, data2=token, op=nl.subtract)
        walked.begin_within(rest, first_block, skipped)
        load_number(self._start, token)

    def attend_window(self) -> None:
        """Every q_block over the kv_tiles that a window's edge cuts."""
        window = self.prior.window
        if window is None or self._window is None:
            return
        items = [
            _Item(queries, stage, scale, window.begin_tile + number * window.tiles)
            for number in range(window.num_segments)
            for queries, stage, scale in zip(
                self.groups, self._window_stages, self.scales, strict=True
            )
        ]
        self._window.attend(items)
        self.softmax.drain()

    def attend(self) -> None:
        """Every q_block over all other segments."""
        if self._walked is None or self._sizes is None:
            return
        if self._sizes.long:
            self._walked.run(self._sizes.long, 0, self._start)
        self._walked.run(self._sizes.short, self._start, self._end)
