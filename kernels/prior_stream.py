"""Segments of the prior for the bounded softmax, prepared one ahead of their use.

While a segment is computed, the next one is made from the staging tiles in small steps between
macros, and the gather of the one after it is started at the end. A dynamic loop has one traced
body, hence fixed addresses: the prepared segment is copied to the tiles that the body computes
with at its beginning.
"""

from .backend import nisa, nl
from .bounded import BoundedRows, values_with_ones
from .loading import RowTiles
from .paged_cache import PagedSegments, Walk
from .tile_schedule import PARTITIONS

TILES_PER_STEP = 3
"""Key tiles that one step transposes."""

DELAY = 2
"""Steps between the selects and the first transpose, so that PE does not wait for DVE."""

LONG_BLOCKS = 4
"""Blocks of a share from which on there are enough macros to split the selects into pieces."""


class PriorStream(nl.NKIObject):
    """Prepared segments of one KV head, from the walk's start on."""

    def __init__(self, rows: BoundedRows, prior: PagedSegments, walk: Walk, kv_head: int) -> None:
        d, tokens = prior.d, prior.tokens
        self.rows = rows
        self.prior = prior
        self.walk = walk
        self.kv_head = kv_head
        self.pieces = 1
        if rows.num_blocks >= LONG_BLOCKS and tokens >= 4:
            self.pieces = 4
        transposes = (tokens + TILES_PER_STEP - 1) // TILES_PER_STEP
        self.steps = 2 * self.pieces + DELAY + transposes + 1
        self.done = 0
        keys = (d, prior.segment_size)
        values = (PARTITIONS, tokens * (d + 1))
        self.blocks = nl.ndarray((PARTITIONS, prior.runs), dtype=nl.int32, buffer=nl.sbuf)
        self.present = nl.ndarray((PARTITIONS, tokens), dtype=nl.uint8, buffer=nl.sbuf)
        self.k_real = nl.ndarray((PARTITIONS, tokens * d), dtype=prior.dtype, buffer=nl.sbuf)
        self.next_keys = nl.ndarray(keys, dtype=prior.dtype, buffer=nl.sbuf)
        self.next_values = nl.ndarray(values, dtype=prior.dtype, buffer=nl.sbuf)
        self.keys = nl.ndarray(keys, dtype=prior.dtype, buffer=nl.sbuf)
        self.values = nl.ndarray(values, dtype=prior.dtype, buffer=nl.sbuf)

    def fetch_blocks(self) -> None:
        """Read the table of the segment that the walk stands at."""
        self.prior.fetch_blocks(0, self.walk, self.blocks)

    def fetch_rows(self) -> None:
        """Start the gather of the segment whose table was read, and move the walk's block on."""
        self.prior.fetch_rows(self.blocks, self.kv_head)
        self.prior.advance_block(self.walk)

    def step(self) -> None:
        """The next step of preparing the fetched segment; the last one fetches the following."""
        prior = self.prior
        d, tokens = prior.d, prior.tokens
        step = self.done
        selects = 2 * self.pieces
        tile = (step - selects - DELAY) * TILES_PER_STEP
        if step == 0:
            prior.mark_present(self.walk, self.blocks, self.present)
        if step < self.pieces:
            first, count = self.piece(step)
            nisa.select_reduce(
                dst=self.k_real[:, first * d : (first + count) * d],
                predicate=self.present.ap([[tokens, PARTITIONS], [1, count], [0, d]], offset=first),
                on_true=prior.k_stage[:, first * d : (first + count) * d],
                on_false=0.0,
            )
        elif step < selects:
            first, count = self.piece(step - self.pieces)
            values_with_ones(prior.v_stage, self.present, self.next_values, first, count)
        elif step == selects:
            self.fetch_blocks()
        elif step == self.steps - 1:
            prior.advance_counts(self.walk)
            self.fetch_rows()
        elif tile >= 0:
            count = min(TILES_PER_STEP, tokens - tile)
            self.rows.transpose(
                RowTiles(self.k_real, d, d), tile, count,
                self.next_keys[:, tile * PARTITIONS : (tile + count) * PARTITIONS],
            )  # fmt: skip
        self.done = step + 1

    def piece(self, index: int) -> tuple[int, int]:
        """First token slot and number of slots of one of the pieces of a segment."""
        tokens = self.prior.tokens
        first = index * tokens // self.pieces
        return first, (index + 1) * tokens // self.pieces - first

    def finish(self) -> None:
        """All steps that are left."""
        while self.done < self.steps:
            self.step()

    def take(self) -> None:
        """Make the prepared segment the current one."""
        nisa.tensor_copy(dst=self.keys, src=self.next_keys)
        nisa.tensor_copy(dst=self.values, src=self.next_values)
        self.done = 0

    def attend(self, end: nisa.VirtualRegister | int, exp_scale: float | nl.NkiTensor) -> None:
        """Every block over the segments from the walk's start to `end`."""
        rows, prior = self.rows, self.prior

        def segment(i: nisa.VirtualRegister) -> None:
            self.take()
            rows.beside = [[self]]
            rows.attend_segment(self.keys, self.values, prior.tokens, exp_scale)
            self.finish()

        nl.fori_loop(self.walk.start, end, segment, step=prior.segment_size)
