"""The prior for the bounded softmax, its segments prepared while others are computed.

A segment goes through three states: its rows are gathered into staging tiles, made into key columns
and values with ones, and computed with. A dynamic loop has one traced body, hence fixed addresses:

    WholeSegments  two segments per trip in two sets of tiles. While one is computed, the other is
                   prepared and the gather of its successor started. An odd last one follows.
    TailSegments   shorter segments, the last one partly filled, one per trip: the prepared segment
                   is copied to the tiles that the body computes with.
"""

from .backend import nisa, nl
from .bounded import LAG, BoundedRows, values_with_ones
from .exact_rows import ExactRows
from .loading import RowTiles
from .paged_cache import PagedSegments, Walk, aligned_down, load_tokens
from .softmax import MASKED, ScoreScale
from .tile_schedule import PARTITIONS

TILES_PER_STEP = 3
"""Key tiles that one step transposes."""

MANY_BLOCKS = 4
"""Blocks of a share above which a trip of two short segments is long enough."""

TAIL_SEGMENT = 512
"""Tokens of the segments that hold what the whole segments leave of the prior."""

DELAY = 2
"""Steps between writing key rows and the first transpose, so that PE does not wait for DVE."""


class PreparedSegment(nl.NKIObject):
    """Staging tiles, key columns and values of one segment, and the steps from one to the next.

    Steps are issued one at a time between macros. The last one starts the gather of the segment
    that the walk stands at.
    """

    def __init__(
        self,
        rows: BoundedRows | ExactRows,
        prior: PagedSegments,
        walk: Walk,
        kv_head: int,
        is_partial: bool,  # whether tokens beyond the prior may be among the rows
    ) -> None:
        d, tokens = prior.d, prior.tokens
        self.rows = rows
        self.prior = prior
        self.walk = walk
        self.kv_head = kv_head
        self.is_partial = is_partial
        self.k_stage = prior.new_key_stage()
        self.v_stage = nl.ndarray(
            (PARTITIONS, tokens * d), dtype=prior.v_runs.dtype, buffer=nl.sbuf
        )
        self.blocks = prior.new_blocks()
        self.present = nl.ndarray((PARTITIONS, tokens), dtype=nl.uint8, buffer=nl.sbuf)
        self.mapped = nl.ndarray((PARTITIONS, prior.runs), dtype=nl.float32, buffer=nl.sbuf)
        self.keys = nl.ndarray((d, prior.segment_size), dtype=prior.dtype, buffer=nl.sbuf)
        self.values = nl.ndarray((PARTITIONS, tokens * (d + 1)), dtype=prior.dtype, buffer=nl.sbuf)
        # MASKED where a token is absent, for rows that take an exact maximum.
        self.mask: nl.NkiTensor | None = None
        if rows.needs_mask:
            self.mask = nl.ndarray((1, prior.segment_size), dtype=nl.bfloat16, buffer=nl.sbuf)
        self.k_rows = self.k_stage[0]
        self.row_steps = 0
        self.existing: nl.NkiTensor | None = None
        if prior.key_columns is not None:
            if is_partial:
                shape = (PARTITIONS, prior.segment_size)
                self.existing = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf)
        elif is_partial or prior.k_dtype != prior.dtype:
            self.k_rows = nl.ndarray((PARTITIONS, tokens * d), dtype=prior.dtype, buffer=nl.sbuf)
            self.row_steps = min(2, tokens)
        transposes = (tokens + TILES_PER_STEP - 1) // TILES_PER_STEP
        self.first_transpose = self.row_steps
        if self.row_steps > 0:
            self.first_transpose = self.row_steps + DELAY
        # Values may still be read by P V of the LAG macros before.
        self.first_value = max(LAG, self.first_transpose + transposes)
        self.value_steps = 1
        if is_partial:
            self.value_steps = min(2, tokens)
        self.steps = self.first_value + self.value_steps + 1
        self.done = 0

    def clear(self, k_engine: nisa.engine, v_engine: nisa.engine, zero: nl.NkiTensor) -> None:
        """Write the staging tiles once, before the first gather skips rows of them."""
        for stage in self.k_stage:
            clear(stage.view(nl.float32), k_engine, zero)
        clear(self.v_stage.view(nl.float32), v_engine, zero)

    def fetch(self) -> None:
        """Read the table of the segment that the walk stands at and start its gather."""
        self.fetch_blocks()
        self.fetch_rows()

    def fetch_blocks(self) -> None:
        """Read the table of the segment that the walk stands at."""
        self.prior.fetch_blocks(0, self.walk, self.blocks)

    def fetch_rows(self) -> None:
        """Start the gather of the segment whose table was read, and move the walk's block on."""
        self.prior.fetch_rows(self.blocks, self.kv_head, self.k_stage, self.v_stage)
        self.prior.advance_block(self.walk)

    def step(self) -> None:
        """The next step of preparing the gathered segment; the last one gathers another."""
        step = self.done
        if step == 0:
            self.mark()
        if step < self.row_steps:
            self.write_key_rows(step)
        if step == DELAY and self.mask is not None:
            self.write_mask(self.mask)
        tile = (step - self.first_transpose) * TILES_PER_STEP
        if tile >= 0 and tile < self.prior.tokens:
            self.transpose(tile)
        if step >= self.first_value and step < self.steps - 1:
            self.write_values(step - self.first_value)
        if step == 1:
            self.fetch_blocks()
        if step == self.steps - 1:
            self.fetch_rows()
        self.done = step + 1

    def finish(self) -> None:
        """All steps that are left, after the macros in flight."""
        if self.done < self.steps:
            self.rows.drain()
        while self.done < self.steps:
            self.step()

    def mark(self) -> None:
        """Which tokens exist and are mapped."""
        prior = self.prior
        if self.is_partial:
            prior.mark_present(self.walk, self.blocks, self.present)
            if self.existing is not None:
                prior.mark_existing(self.walk, self.existing)
            prior.advance_counts(self.walk)
        else:
            nisa.tensor_scalar(
                dst=self.mapped, data=self.blocks.by_run, op0=nl.greater_equal, operand0=0.0
            )

    def write_mask(self, mask: nl.NkiTensor) -> None:
        """MASKED for absent tokens, in the order of the key columns."""
        prior = self.prior
        tokens = prior.tokens
        seen: nl.NkiTensor = self.present
        if not self.is_partial:
            seen = self.mapped.ap([[prior.runs, PARTITIONS], [1, prior.runs], [0, prior.run]])
        added = nl.ndarray((PARTITIONS, tokens), dtype=nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=added, data=seen, op0=nl.subtract, operand0=1.0, op1=nl.multiply, operand1=-MASKED
        )
        by_tile = nl.ndarray((tokens, PARTITIONS), dtype=nl.bfloat16, buffer=nl.sbuf)
        self.rows.transpose(RowTiles(added, tokens, tokens), 0, 1, by_tile)
        nisa.dma_copy(dst=mask, src=by_tile)

    def piece(self, index: int, pieces: int) -> tuple[int, int]:
        """First token slot and number of slots of one of the pieces of the segment."""
        tokens = self.prior.tokens
        first = index * tokens // pieces
        return first, (index + 1) * tokens // pieces - first

    def write_key_rows(self, index: int) -> None:
        """A piece of the key rows in the dtype of the queries, zero where a partial one ends."""
        d, tokens = self.prior.d, self.prior.tokens
        first, count = self.piece(index, self.row_steps)
        own = self.k_rows[:, first * d : (first + count) * d]
        stage = self.k_stage[0][:, first * d : (first + count) * d]
        if self.is_partial:
            nisa.select_reduce(
                dst=own,
                predicate=self.present.ap([[tokens, PARTITIONS], [1, count], [0, d]], offset=first),
                on_true=stage, on_false=0.0,
            )  # fmt: skip
        else:
            nisa.tensor_copy(dst=own, src=stage)

    def transpose(self, tile: int) -> None:
        """Key columns of TILES_PER_STEP tiles."""
        d = self.prior.d
        count = min(TILES_PER_STEP, self.prior.tokens - tile)
        columns = self.keys[:, tile * PARTITIONS : (tile + count) * PARTITIONS]
        if self.prior.key_columns is not None:
            self.prior.key_columns.write_columns(
                self.k_stage, self.existing, tile, count, [columns]
            )
        else:
            self.rows.transpose(RowTiles(self.k_rows, d, d), tile, count, columns)

    def write_values(self, index: int) -> None:
        """Values next to ones, zero where a token is absent.

        Rows of a whole segment are finite, also those that a skipped gather left: a product with 0
        or 1 drops them, in a fast mode of DVE. Their keys do not matter then.
        """
        prior = self.prior
        d, tokens = prior.d, prior.tokens
        if self.is_partial:
            first, count = self.piece(index, self.value_steps)
            values_with_ones(self.v_stage, self.present, self.values, first, count)
            return
        width = tokens * (d + 1)
        for run in range(prior.runs):
            first = run * prior.run
            nisa.tensor_scalar(
                dst=self.values.ap(
                    [[width, PARTITIONS], [d + 1, prior.run], [1, d]], offset=first * (d + 1)
                ),
                data=self.v_stage[:, first * d : (first + prior.run) * d],
                op0=nl.multiply, operand0=self.mapped[:, run : run + 1],
            )  # fmt: skip
        nisa.tensor_copy(
            dst=self.values.ap([[width, PARTITIONS], [d + 1, tokens], [1, 1]], offset=d),
            src=self.mapped.ap([[prior.runs, PARTITIONS], [1, prior.runs], [0, prior.run]]),
        )


class WholeSegments(nl.NKIObject):
    """The whole segments of a prior, two per trip, and an odd last one."""

    def __init__(
        self,
        rows: BoundedRows | ExactRows,
        prior: PagedSegments,
        prior_count: nl.NkiTensor,  # [128, 1] fp32
        kv_head: int,
    ) -> None:
        self.rows = rows
        self.prior = prior
        walk = prior.new_walk(prior_count)
        self.segments = [
            PreparedSegment(rows, prior, walk, kv_head, False),
            PreparedSegment(rows, prior, walk, kv_head, False),
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
            rows.attend_segment(first.keys, first.values, first.mask, self.prior.tokens, scale)
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
        rows.attend_segment(current.keys, current.values, current.mask, self.prior.tokens, scale)
        other.finish()


class TailSegments(nl.NKIObject):
    """What whole segments leave of a prior, in shorter ones."""

    def __init__(
        self,
        rows: BoundedRows | ExactRows,
        prior: PagedSegments,
        prior_count: nl.NkiTensor,  # [128, 1] fp32
        whole_size: int | None,  # tokens of a whole segment; None: the tail is all of the prior
        kv_head: int,
    ) -> None:
        self.rows = rows
        self.prior = prior
        self.prior_count = prior_count
        self.whole_size = whole_size
        self.walk = prior.new_walk(nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf))
        self.segments = [PreparedSegment(rows, prior, self.walk, kv_head, True)]
        following = self.segments[0]
        if prior.key_columns is not None:
            prior.write_positions()
        self.keys = nl.ndarray(following.keys.shape, dtype=prior.dtype, buffer=nl.sbuf)
        self.values = nl.ndarray(following.values.shape, dtype=prior.dtype, buffer=nl.sbuf)
        self.mask: nl.NkiTensor | None = None
        if following.mask is not None:
            self.mask = nl.ndarray(following.mask.shape, dtype=nl.bfloat16, buffer=nl.sbuf)

    def begin(self) -> None:
        """Put the walk where the whole segments end."""
        nisa.tensor_copy(dst=self.walk.counts, src=self.prior_count)
        if self.whole_size is not None:
            self.prior.skip_to(self.walk, self.prior_count, self.whole_size)

    def attend(
        self, start: nisa.VirtualRegister | int, end: nisa.VirtualRegister, scale: ScoreScale
    ) -> None:
        """Every block over the segments from `start` to `end`, of which the first is prepared."""
        following = self.segments[0]

        def segment(i: nisa.VirtualRegister) -> None:
            nisa.tensor_copy(dst=self.keys, src=following.keys)
            nisa.tensor_copy(dst=self.values, src=following.values)
            if self.mask is not None and following.mask is not None:
                nisa.tensor_copy(dst=self.mask, src=following.mask)
            following.done = 0
            rows = self.rows
            rows.beside = [[following]]
            rows.attend_segment(self.keys, self.values, self.mask, self.prior.tokens, scale)
            following.finish()
            self.rows.drain()

        nl.fori_loop(start, end, segment, step=self.prior.segment_size)


class PriorStream(nl.NKIObject):
    """All of a share's prior: whole segments, then the tail."""

    def __init__(
        self,
        rows: BoundedRows | ExactRows,
        whole: PagedSegments | None,  # None: short segments only
        tail: PagedSegments,
        prior_count: nl.NkiTensor,  # [128, 1] fp32
        kv_head: int,
    ) -> None:
        self.zero = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=self.zero, value=0.0, engine=nisa.engine.gpsimd)
        self.prior_count = prior_count
        self.whole: WholeSegments | None = None
        # Those that are prepared before the first one is computed.
        self.first_segments: list[PreparedSegment] = []
        # Loop bounds in tokens: nothing is done where they are not loaded.
        self.pairs_end = nisa.register_alloc(0)
        self.whole_end = nisa.register_alloc(0)
        self.end = nisa.register_alloc(0)
        whole_size = None
        if whole is not None:
            self.whole = WholeSegments(rows, whole, prior_count, kv_head)
            self.first_segments.append(self.whole.segments[0])
            whole_size = whole.segment_size
        self.tail = TailSegments(rows, tail, prior_count, whole_size, kv_head)
        self.first_segments.append(self.tail.segments[0])

    def begin(self) -> None:
        """Read the table of the first segment and clear its staging tiles."""
        if self.whole is not None:
            first = self.whole.segments[0]
            first.fetch_blocks()
            first.clear(nisa.engine.gpsimd, nisa.engine.scalar, self.zero)

    def fetch_first(self) -> None:
        """Start the gather of the first segment; ACT is still idle enough to clear the second."""
        if self.whole is not None:
            self.whole.segments[0].fetch_rows()
            self.whole.segments[1].clear(nisa.engine.scalar, nisa.engine.scalar, self.zero)

    def load_bounds(self) -> None:
        """Loop bounds in registers, and where the tail begins."""
        if self.whole is not None:
            whole_size = self.whole.prior.segment_size
            _, pairs = aligned_down(self.prior_count, 2 * whole_size)
            load_tokens(self.pairs_end, pairs)
            _, whole = aligned_down(self.prior_count, whole_size)
            load_tokens(self.whole_end, whole)
        self.tail.begin()
        load_tokens(self.end, self.prior_count)

    def fetch_others(self) -> None:
        """Start the gathers of the tail's first segment and of the second whole one."""
        self.load_bounds()
        following = self.tail.segments[0]
        following.clear(nisa.engine.gpsimd, nisa.engine.gpsimd, self.zero)
        following.fetch()
        if self.whole is not None:
            self.whole.segments[1].fetch()

    def attend(self, scale: ScoreScale) -> None:
        """Every block over all segments."""
        if self.whole is not None:
            self.whole.attend(self.pairs_end, self.whole_end, scale)
        self.tail.attend(self.whole_end, self.end, scale)


def clear(words: nl.NkiTensor, engine: nisa.engine, zero: nl.NkiTensor) -> None:
    """Zero a tile [p, n] fp32; ACT, which has no memset, copies a column `zero` [128, 1]."""
    if engine != nisa.engine.scalar:
        nisa.memset(dst=words, value=0.0, engine=engine)
        return
    height, width = words.shape
    nisa.tensor_copy(dst=words, src=zero.ap([[1, height], [0, width]]), engine=engine)


def whole_segment_size(kv_segment_size: int, block_size: int, num_blocks: int) -> int:
    """Tokens of a whole segment: with many blocks of queries half, as a trip computes two."""
    half = kv_segment_size // 2
    if num_blocks > MANY_BLOCKS and half % PARTITIONS == 0 and half % block_size == 0:
        return half
    return kv_segment_size
