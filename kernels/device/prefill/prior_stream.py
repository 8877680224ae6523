"""The prior of a share, its segments prepared (prepared_segment.py) while others are computed.

A dynamic loop has one traced body, hence fixed addresses:

    WholeSegments  two segments per trip in two sets of tiles. While one is computed, the other is
                   prepared and the gather of its successor started. An odd last one follows.
    TailSegments   one per trip: the prepared segment is copied to the tiles that the body computes
                   with. What whole segments leave, in shorter ones, the first and last one partly
                   used, for the exact softmax with many rows in two lengths; or whole ones where a
                   body of two would make the program too long.
"""

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..cache.paged_cache import PagedSegments, aligned_down, load_tokens
from ..loading import new_columns
from ..softmax import ScoreScale
from .bounded import BoundedRows
from .exact_rows import ExactRows
from .first_key import FirstKey
from .prepared_segment import FetchAhead, PreparedSegment
from .window_stream import WindowSections, WindowTokens

MANY_BLOCKS = 4
"""Blocks of a share above which a trip of two short segments is long enough."""


class WholeSegments(nl.NKIObject):
    """The whole segments of a prior, two per trip, and an odd last one."""

    def __init__(
        self,
        rows: BoundedRows | ExactRows,
        prior: PagedSegments,
        prior_count: nl.NkiTensor,  # [128, 1] fp32
        kv_head: int,
        first_key: FirstKey | None,
    ) -> None:
        self.rows = rows
        self.prior = prior
        walk = prior.new_walk(prior_count)
        self.segments = [
            PreparedSegment(rows, prior, walk, kv_head, False, first_key),
            PreparedSegment(rows, prior, walk, kv_head, False, first_key),
        ]

    def attend(
        self,
        pairs_end: nisa.VirtualRegister,  # tokens in pairs of segments
        end: nisa.VirtualRegister,  # tokens in whole segments
        scale: ScoreScale,
    ) -> None:
        """Every block over the segments, of which the first is prepared."""
        first, second = self.segments
        size = self.prior.segment_size

        def pair(i: nisa.VirtualRegister) -> None:
            self.attend_beside(first, second, scale)
            self.attend_beside(second, first, scale)
            self.rows.drain()

        def odd(i: nisa.VirtualRegister) -> None:
            rows = self.rows
            rows.beside = []
            rows.attend_segment(
                first.keys, first.values, first.mask, self.prior.tokens, scale, None
            )
            self.rows.drain()

        nl.fori_loop(0, pairs_end, pair, step=2 * size)
        nl.fori_loop(pairs_end, end, odd, step=size)

    def attend_beside(
        self,
        current: PreparedSegment,
        other: PreparedSegment,
        scale: ScoreScale,
    ) -> None:
        """Compute with one segment while the other is prepared."""
        other.done = 0
        rows = self.rows
        rows.beside = [[other]]
        rows.attend_segment(
            current.keys, current.values, current.mask, self.prior.tokens, scale, None
        )
        other.finish()


class TailSegments(nl.NKIObject):
    """What is left of a prior from some token on, in shorter segments."""

    def __init__(
        self,
        rows: BoundedRows | ExactRows,
        prior: PagedSegments,
        kv_head: int,
        first_key: FirstKey | None,
        is_partial: bool,  # whether some segment may hold tokens beyond the prior
        skips: bool = False,  # whether tokens of the first one may be left out
    ) -> None:
        self.rows = rows
        self.prior = prior
        walk = prior.new_walk(nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf))
        if skips:
            walk.skipped = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        self.walk = walk
        self.segments = [PreparedSegment(rows, prior, self.walk, kv_head, is_partial, first_key)]
        following = self.segments[0]
        if prior.key_columns is not None:
            prior.write_positions()
        self.keys = new_columns(prior.tokens, prior.d, prior.dtype)
        self.values = nl.ndarray(following.values.shape, dtype=prior.dtype, buffer=nl.sbuf)
        self.mask: nl.NkiTensor | None = None
        if following.mask is not None:
            self.mask = nl.ndarray(following.mask.shape, dtype=nl.bfloat16, buffer=nl.sbuf)

    def begin(
        self,
        prior_count: nl.NkiTensor,  # [128, 1] fp32
        first: nl.NkiTensor,  # [128, 1] fp32: first token that matters; negative is 0
        alignment: int,
        start: nisa.VirtualRegister,  # result: where the walk begins, aligned
    ) -> None:
        """Put the walk where the tail begins."""
        nisa.tensor_copy(dst=self.walk.counts, src=prior_count)
        token = self.prior.skip_to(self.walk, first, alignment)
        if self.walk.skipped is not None:
            nisa.tensor_tensor(dst=self.walk.skipped, data1=first, data2=token, op=nl.subtract)
        load_tokens(start, token)

    def attend(
        self, start: nisa.VirtualRegister | int, end: nisa.VirtualRegister, scale: ScoreScale
    ) -> None:
        """Every block over the segments from `start` to `end`, of which the first is prepared."""
        following = self.segments[0]

        def segment(i: nisa.VirtualRegister) -> None:
            for part in range(len(self.keys)):
                nisa.tensor_copy(dst=self.keys[part], src=following.keys[part])
            nisa.tensor_copy(dst=self.values, src=following.values)
            if self.mask is not None and following.mask is not None:
                nisa.tensor_copy(dst=self.mask, src=following.mask)
            following.done = 0
            rows = self.rows
            rows.beside = [[following]]
            rows.attend_segment(self.keys, self.values, self.mask, self.prior.tokens, scale, None)
            following.finish()
            self.rows.drain()

        nl.fori_loop(start, end, segment, step=self.prior.segment_size)


class PriorStream(nl.NKIObject):
    """All of a share's prior.

    Without a window whole segments, then the tail, of which the exact softmax takes longer pieces
    first. With one the sections that a window's edge may cut (window_stream.py), then what lies
    between them and the chunk, as a tail.
    """

    def __init__(
        self,
        rows: BoundedRows | ExactRows,
        whole: PagedSegments | None,
        in_pairs: bool,  # two whole segments per trip
        half: PagedSegments | None,  # twice as long as the tail's
        tail: PagedSegments | None,
        window: WindowTokens | None,
        prior_count: nl.NkiTensor,  # [128, 1] fp32
        kv_head: int,
        first_key: FirstKey | None,
    ) -> None:
        self.zero = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=self.zero, value=0.0, engine=nisa.engine.gpsimd)
        self.prior_count = prior_count
        self.first_key = first_key
        self.whole: WholeSegments | None = None
        self.single: TailSegments | None = None
        self.half: TailSegments | None = None
        self.tail: TailSegments | None = None
        self.window: WindowSections | None = None
        # Those that are prepared before the first one is computed.
        self.first_segments: list[PreparedSegment] = []
        # What is done beside the first blocks.
        self.beside: list[PreparedSegment | FetchAhead] = []
        # Loop bounds in tokens: nothing is done where they are not loaded.
        self.pairs_end = nisa.register_alloc(0)
        self.whole_end = nisa.register_alloc(0)
        self.tail_start = nisa.register_alloc(0)
        self.end = nisa.register_alloc(0)
        self.whole_size = 0
        if whole is not None:
            self.whole_size = whole.segment_size
            if in_pairs:
                self.whole = WholeSegments(rows, whole, prior_count, kv_head, first_key)
                self.first_segments.append(self.whole.segments[0])
            else:
                self.single = TailSegments(rows, whole, kv_head, first_key, False)
                self.first_segments.append(self.single.segments[0])
        if window is not None:
            self.window = WindowSections(rows, window, kv_head, first_key)
            self.first_segments.append(self.window.segments[0])
        if half is not None:
            self.half = TailSegments(rows, half, kv_head, first_key, True)
            self.first_segments.append(self.half.segments[0])
        if tail is not None:
            self.tail = TailSegments(rows, tail, kv_head, first_key, True, window is not None)
            self.first_segments.append(self.tail.segments[0])

    def begin(self) -> None:
        """Read the table of the first segment and clear its staging tiles."""
        if self.first_key is not None:
            self.first_key.write()
        if self.whole_size > 0 or self.window is not None:
            first = self.first_segments[0]
            first.fetch_blocks()
            first.clear(nisa.engine.gpsimd, nisa.engine.scalar, self.zero)

    def fetch_first(self) -> None:
        """Start the gather of the first segment; ACT is still idle enough to clear the second."""
        if self.whole_size > 0:
            self.first_segments[0].fetch_rows(0)
        if self.whole is not None:
            self.whole.segments[1].clear(nisa.engine.scalar, nisa.engine.scalar, self.zero)
        if self.window is not None:
            for part in range(self.window.tokens.fetch_steps):
                self.window.segments[0].fetch_rows(part)
            if self.window.num_sections > 1:
                self.window.segments[1].clear(nisa.engine.scalar, nisa.engine.scalar, self.zero)

    def load_bounds(self, tail: TailSegments) -> None:
        """Loop bounds in registers, and where each kind of segment begins."""
        count = self.prior_count
        load_tokens(self.end, count)
        if self.whole_size > 0:
            _, pairs = aligned_down(count, 2 * self.whole_size)
            load_tokens(self.pairs_end, pairs)
            if self.half is None:
                tail.begin(count, count, self.whole_size, self.tail_start)
                nisa.register_move(self.whole_end, self.tail_start)
                return
            self.half.begin(count, count, self.whole_size, self.whole_end)
            # As many as leave one shorter segment at most; they may reach beyond the prior.
            rest = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
            short = tail.prior.segment_size
            nisa.tensor_scalar(dst=rest, data=count, op0=nl.add, operand0=float(short - 1))
            tail.begin(count, rest, 2 * short, self.tail_start)
        elif self.window is not None:
            first = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(
                dst=first, data=count, op0=nl.add,
                operand0=float(self.window.end_tile * PARTITIONS),
            )  # fmt: skip
            tail.begin(count, first, tail.prior.segment_size, self.tail_start)
        else:
            nisa.tensor_copy(dst=tail.walk.counts, src=count)

    def fetch_others(self) -> None:
        """Start the gathers of the tail's first segments and of the second other one."""
        if self.tail is not None:
            self.load_bounds(self.tail)
            for tail in [self.half, self.tail]:
                if tail is not None:
                    following = tail.segments[0]
                    following.clear(nisa.engine.gpsimd, nisa.engine.gpsimd, self.zero)
                    following.fetch()
        if self.whole is not None:
            self.whole.segments[1].fetch()
        self.beside = []
        if self.window is not None and self.window.num_sections > 1:
            self.beside.append(FetchAhead(self.window.segments[1]))
        for segment in self.first_segments:
            self.beside.append(segment)

    def attend_window(self, scale: ScoreScale) -> None:
        """Every block over the sections of a window's edge."""
        if self.window is not None:
            self.window.attend(scale)

    def attend(self, scale: ScoreScale) -> None:
        """Every block over all other segments."""
        if self.whole is not None:
            self.whole.attend(self.pairs_end, self.whole_end, scale)
        if self.single is not None:
            self.single.attend(0, self.whole_end, scale)
        if self.half is not None:
            self.half.attend(self.whole_end, self.tail_start, scale)
        if self.tail is not None:
            self.tail.attend(self.tail_start, self.end, scale)
