"""A segment of the prior on its way to key columns and values, while others are computed.

Its rows are gathered into staging tiles, then made into key columns and values with ones, in steps
that are issued one at a time between macros.
"""

from typing import Any

from ...backend import nisa, nl
from ...sizes import MASKED, PARTITIONS
from ..loading import RowTiles, new_columns, transpose_features, values_with_ones
from .bounded import LAG, BoundedRows
from .exact_rows import ExactRows
from .first_key import FirstKey

KEY_TILES_PER_STEP = 3
"""Key tiles that one step transposes."""

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
        prior: Any,  # PagedSegments or WindowTokens
        walk: Any,  # where in it, from its new_walk
        kv_head: int,
        is_partial: bool,  # whether tokens beyond the prior may be among the rows
        first_key: FirstKey | None,  # in place of absent keys
    ) -> None:
        d, tokens = prior.d, prior.tokens
        self.rows = rows
        self.prior = prior
        self.walk = walk
        self.kv_head = kv_head
        self.is_partial = is_partial
        self.first_key = first_key
        self.k_stage = prior.new_key_stage()
        self.v_stage = nl.ndarray((PARTITIONS, tokens * d), dtype=prior.v_dtype, buffer=nl.sbuf)
        self.blocks = prior.new_blocks()
        self.present = nl.ndarray((PARTITIONS, tokens), dtype=nl.uint8, buffer=nl.sbuf)
        self.mapped = nl.ndarray((PARTITIONS, prior.runs), dtype=nl.float32, buffer=nl.sbuf)
        self.keys = new_columns(tokens, d, prior.dtype)
        self.values = nl.ndarray((PARTITIONS, tokens * (d + 1)), dtype=prior.dtype, buffer=nl.sbuf)
        # MASKED where a token is absent, for rows that take an exact maximum of what is there.
        self.mask: nl.NkiTensor | None = None
        if rows.is_exact and first_key is None:
            self.mask = nl.ndarray((1, prior.segment_size), dtype=nl.bfloat16, buffer=nl.sbuf)
        self.k_rows = self.k_stage[0]
        self.row_steps = 0
        self.existing: nl.NkiTensor | None = None
        if prior.key_columns is not None:
            self.existing = self.blocks.seen
            if is_partial:
                shape = (PARTITIONS, prior.segment_size)
                self.existing = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf)
        elif is_partial or prior.k_dtype != prior.dtype:
            self.k_rows = nl.ndarray((PARTITIONS, tokens * d), dtype=prior.dtype, buffer=nl.sbuf)
            self.row_steps = min(2, tokens)
        transposes = (tokens + KEY_TILES_PER_STEP - 1) // KEY_TILES_PER_STEP
        self.first_transpose = self.row_steps
        if self.row_steps > 0:
            self.first_transpose = self.row_steps + DELAY
        # Values may still be read by P V of the LAG macros before.
        self.first_value = max(LAG, self.first_transpose + transposes)
        self.value_steps = 1
        if is_partial:
            self.value_steps = min(2, tokens)
        self.first_fetch = self.first_value + self.value_steps
        self.steps = self.first_fetch + prior.fetch_steps
        self.done = 0
        self.vector_ns = 400.0

    def clear(self, k_engine: nisa.engine, v_engine: nisa.engine, zero: nl.NkiTensor) -> None:
        """Write the staging tiles once, before the first gather skips rows of them."""
        if self.first_key is not None and not self.is_partial:
            self.first_key.fill(self.k_stage[0], k_engine)
        else:
            for stage in self.k_stage:
                clear(stage.view(nl.float32), k_engine, zero)
        if self.first_key is not None and self.is_partial:
            self.first_key.fill(self.k_rows, k_engine)
        clear(self.v_stage.view(nl.float32), v_engine, zero)

    def fetch(self) -> None:
        """Read the table of the segment that the walk stands at and start its gather."""
        self.fetch_blocks()
        for part in range(self.prior.fetch_steps):
            self.fetch_rows(part)

    def fetch_blocks(self) -> None:
        """Read the table of the segment that the walk stands at."""
        self.prior.fetch_blocks(self.walk, self.blocks)

    def fetch_rows(self, part: int) -> None:
        """Start a part of the gather of the segment whose table was read; the last one moves on."""
        if part == 0 and self.prior.seen_in_part and self.first_key is not None:
            self.first_key.fill(self.k_stage[0], nisa.engine.gpsimd)
        self.prior.fetch_rows(
            self.walk, self.blocks, self.kv_head, self.k_stage, self.v_stage, part
        )
        if part == self.prior.fetch_steps - 1:
            self.prior.advance_block(self.walk)

    def step(self) -> None:
        """The next step of preparing the gathered segment; the last ones gather another."""
        step = self.done
        if step == 0:
            self.mark()
        if step < self.row_steps:
            self.write_key_rows(step)
        if step == DELAY and self.mask is not None:
            self.write_mask(self.mask)
        tile = (step - self.first_transpose) * KEY_TILES_PER_STEP
        if tile >= 0 and tile < self.prior.tokens:
            self.transpose(tile)
        if step >= self.first_value and step < self.first_fetch:
            self.write_values(step - self.first_value)
        if step == 1:
            self.fetch_blocks()
        if step >= self.first_fetch:
            self.fetch_rows(step - self.first_fetch)
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
                if self.walk.skipped is not None:
                    self.clear_skipped(self.existing)
            prior.advance_counts(self.walk)
        else:
            # The sign alone: a slot may have more than the 24 bits that fp32 compares exactly.
            sign = nl.ndarray(self.mapped.shape, dtype=nl.int32, buffer=nl.sbuf)
            nisa.tensor_scalar(
                dst=sign, data=self.blocks.by_run, op0=nl.bitwise_and, operand0=-(2**31)
            )
            nisa.tensor_scalar(dst=self.mapped, data=sign, op0=nl.greater_equal, operand0=0.0)

    def clear_skipped(self, existing: nl.NkiTensor) -> None:
        """Zero the staged columns of tokens that do not count.

        A later segment with an absent block there keeps them, and a NaN passes a mask.
        """
        for stage in self.k_stage:
            nisa.select_reduce(
                dst=stage, predicate=existing[0 : stage.shape[0], :], on_true=stage, on_false=0.0
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
        """A piece of the key rows in the dtype of the queries.

        Of a partial segment zero where a token is absent, or what is there, from clear() on.
        """
        d, tokens = self.prior.d, self.prior.tokens
        first, count = self.piece(index, self.row_steps)
        own = self.k_rows[:, first * d : (first + count) * d]
        stage = self.k_stage[0][:, first * d : (first + count) * d]
        present = self.present.ap([[tokens, PARTITIONS], [1, count], [0, d]], offset=first)
        if self.is_partial and self.first_key is not None:
            nisa.tensor_copy_predicated(dst=own, src=stage, predicate=present)
        elif self.is_partial:
            nisa.select_reduce(dst=own, predicate=present, on_true=stage, on_false=0.0)
        else:
            nisa.tensor_copy(dst=own, src=stage)

    def transpose(self, tile: int) -> None:
        """Key columns of KEY_TILES_PER_STEP tiles."""
        d = self.prior.d
        count = min(KEY_TILES_PER_STEP, self.prior.tokens - tile)
        if self.prior.key_columns is not None:
            self.prior.key_columns.write_columns(
                self.k_stage, self.existing, tile, count, self.keys
            )
        else:
            transpose_features(self.rows, self.k_rows, d, tile, count, self.keys, tile)

    def write_values(self, index: int) -> None:
        """Values next to ones, zero where a token is absent.

        All rows that whole segments and sections of a window read are finite, also those that a
        skipped gather left: a product with 0 or 1 drops them, in a fast mode of DVE. Their keys do
        not matter then.
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


class FetchAhead(nl.NKIObject):
    """The first gather of a segment that is computed later, in steps beside macros."""

    def __init__(self, segment: PreparedSegment) -> None:
        self.segment = segment
        self.steps = 1 + segment.prior.fetch_steps
        self.done = 0
        self.vector_ns = 0.0

    def step(self) -> None:
        """Read the table, then start a part of the gather."""
        if self.done == 0:
            self.segment.fetch_blocks()
        else:
            self.segment.fetch_rows(self.done - 1)
        self.done = self.done + 1

    def finish(self) -> None:
        """All steps that are left."""
        while self.done < self.steps:
            self.step()


def clear(words: nl.NkiTensor, engine: nisa.engine, zero: nl.NkiTensor) -> None:
    """Zero a tile [p, n] fp32; ACT, which has no memset, copies a column `zero` [128, 1]."""
    if engine != nisa.engine.scalar:
        nisa.memset(dst=words, value=0.0, engine=engine)
        return
    height, width = words.shape
    nisa.tensor_copy(dst=words, src=zero.ap([[1, height], [0, width]]), engine=engine)
