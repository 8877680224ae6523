"""The result of a share: normalised, checked row by row, stored piece by piece."""

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..loading import row_tile_view, runs_of
from .bounded import BoundedRows
from .exact_rows import ExactRows
from .share_tiles import BLOCK_TILES

SMALLEST_SUM = 8.75651076269652e-27
"""exp(-60), 27 nats above the smallest normal fp32 number."""

LARGEST_SUM = 1.0e37

LARGEST_SCALED_SUM = 1.0e31
"""The same under a v_scale, at least 1e-6: their quotient is a normal number, not flushed."""

SAFE_SUM = 2.0**18
"""More than there are keys, so that a sum of that much has a weight above 1, the largest one of an
exact maximum: no more products are flushed than there."""

SMALLEST_RESULT = 2.0**-90
"""The least that the values of a row's accumulator may add up to, in magnitude, with a sum below
SAFE_SUM. A flushed product is below 2^-126; with up to 2^18 of them in each of up to 2^8 columns
the relative L2 error is below 2^18 * 2^8 * 2^-126 / 2^-90 = 2^-10."""

SMALLEST_SCALED_RESULT = 2.0**-70
"""The same where the chunk's values, products flushed, were divided by a v_scale of at least 1e-6.
"""

ROW_TILES_PER_STEP = 2
"""Tiles that one step normalises."""


class ShareResult(nl.NKIObject):
    """Turns the accumulators of a share into its rows of the result and its flag.

    A *piece* is the row tiles of about one block, all heads of them: what one DMA stores. Steps are
    issued beside macros where later blocks are still computed, or all at the end.
    """

    def __init__(
        self,
        rows: BoundedRows | ExactRows,
        out: nl.NkiTensor,  # [H, S, d] HBM
        tile_valid: nl.NkiTensor,  # [128, tiles] uint8
        sinks: nl.NkiTensor | None,  # [128, tiles] fp32
        value_scale: nl.NkiTensor | None,  # [128, 1] fp32
    ) -> None:
        tiles = rows.tiles
        shape = (PARTITIONS, tiles.num_tiles)
        self.rows = rows
        self.tiles = tiles
        self.out = out
        self.tile_valid = tile_valid
        self.sinks = sinks
        self.value_scale: float | nl.NkiTensor = 1.0
        self.largest_sum = LARGEST_SUM
        self.smallest_result = SMALLEST_RESULT
        if value_scale is not None:
            self.value_scale = value_scale
            self.largest_sum = LARGEST_SCALED_SUM
            self.smallest_result = SMALLEST_SCALED_RESULT
        # One over the row sums, which include the sink; weights of the sinks; the factors of the
        # accumulators; the sum of each row of the result.
        self.reciprocal = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        self.sink_weight = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        self.inverse = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        self.result_sum = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        heads = tiles.share.num_heads
        self.piece = max(1, BLOCK_TILES // heads)
        self.tiles_per_piece = self.piece * heads
        self.last_piece = (tiles.num_tiles - 1) // self.tiles_per_piece * self.tiles_per_piece
        # 1.0 where a real row's sum is not accurate or its result not finite, and where its
        # result may lack products.
        self.is_checked = not rows.is_exact
        self.wrong = nl.ndarray((PARTITIONS, 2, tiles.num_tiles), dtype=nl.float32, buffer=nl.sbuf)
        self.results: list[nl.NkiTensor] = []
        # Steps that can be issued: first tile, the one after the last, and up to which tile the
        # factors are to be made before; 0: they are there. No tile: weights of sinks up to there.
        self.order: list[tuple[int, int, int]] = []
        self.steps = 0
        self.vector_ns = 0.0  # as much on ACT
        self.done = 0
        self.ready_tiles = 0

    def add_block(self, block: int) -> None:
        """Add the steps of the pieces that are complete with this block and those before it."""
        end = block * BLOCK_TILES + self.tiles.tiles_of(block)
        if end < self.tiles.num_tiles:
            end = end // self.tiles_per_piece * self.tiles_per_piece
        begin = self.ready_tiles
        if end > begin:
            if self.sinks is not None:
                self.order.append((begin, begin, end))
            factors_end = end
            for piece in range(begin, end, self.tiles_per_piece):
                last = min(end, piece + self.tiles_per_piece)
                for t in range(piece, last, ROW_TILES_PER_STEP):
                    self.order.append((t, min(last, t + ROW_TILES_PER_STEP), factors_end))
                    factors_end = 0
            self.ready_tiles = end
        self.steps = len(self.order)

    def step(self) -> None:
        """The next step beside macros, on the engine that has time."""
        if self.rows.scalar_is_free:
            self.take_step(1)
        else:
            self.take_step(0)

    def finish(self) -> None:
        """All steps that are left, on ACT and DVE in turn."""
        while self.done < self.steps:
            self.take_step(1)

    def take_step(self, on_scalar: int) -> None:
        """Normalise some tiles, `on_scalar` of each two on ACT; store a piece with its last one."""
        begin, end, factors_end = self.order[self.done]
        if self.sinks is not None and begin == end:
            self.weigh_sinks(self.sinks, begin, factors_end)
            self.done = self.done + 1
            return
        if factors_end > 0:
            self.factors(begin, factors_end)
        for t in range(begin, end):
            self.normalise(t, t % 2 < on_scalar)
        if end == self.last_piece and self.is_checked:
            self.check(0, end)
        if end == self.tiles.num_tiles or end % self.tiles_per_piece == 0:
            self.store((end - 1) // self.tiles_per_piece)
        self.done = self.done + 1

    def weigh_sinks(self, sinks: nl.NkiTensor, first: int, end: int) -> None:
        """Weights of the sinks of some tiles, a step before the factors: DVE waits for ACT."""
        weight = self.sink_weight[:, first:end]
        nisa.tensor_tensor(
            dst=weight, data1=sinks[:, first:end], data2=self.rows.shifts_of(first, end), op=nl.add
        )
        nisa.activation(dst=weight, op=nl.exp, data=weight)

    def factors(self, first: int, end: int) -> None:
        """The factor of each row's accumulator.

        That of a padding row is 0. Its query is zero, so its accumulator is finite unless the
        values are extreme; then the row is not finite, which raises the flag like any other.
        """
        shape = (PARTITIONS, end - first)
        total = self.tiles.sums(first, end)
        if self.sinks is not None:
            with_sink = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
            weight = self.sink_weight[:, first:end]
            nisa.tensor_tensor(dst=with_sink, data1=total, data2=weight, op=nl.add)
            total = with_sink
        own = self.reciprocal[:, first:end]
        nisa.tensor_scalar(dst=own, data=total, op0=nl.maximum, operand0=SMALLEST_SUM)
        nisa.reciprocal(dst=own, data=own)
        nisa.scalar_tensor_tensor(
            dst=self.inverse[:, first:end], data=own, op0=nl.multiply, operand0=self.value_scale,
            op1=nl.multiply, operand1=self.tile_valid[:, first:end],
        )  # fmt: skip

    def check(self, first: int, end: int) -> None:
        """What is wrong with the normalised rows of some tiles; see bounded.py."""
        shape = (PARTITIONS, end - first)
        total = self.tiles.sums(first, end)
        found = self.result_sum[:, first:end]
        inaccurate = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        least = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        size = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(
            dst=inaccurate, data=total, op0=nl.greater_equal, operand0=SMALLEST_SUM,
            op1=nl.multiply, operand1=self.reciprocal[:, first:end],
        )  # fmt: skip
        nisa.scalar_tensor_tensor(
            dst=least, data=total, op0=nl.less, operand0=SAFE_SUM, op1=nl.multiply,
            operand1=self.inverse[:, first:end],
        )  # fmt: skip
        nisa.scalar_tensor_tensor(
            dst=inaccurate, data=inaccurate, op0=nl.less, operand0=1.0 / self.largest_sum,
            op1=nl.multiply, operand1=self.tile_valid[:, first:end],
        )  # fmt: skip
        nisa.scalar_tensor_tensor(
            dst=size, data=found, op0=nl.multiply, operand0=-1.0, op1=nl.maximum, operand1=found
        )
        # Where the sum is finite and accurate, 0 * sum = 0 = inaccurate; NaN equals nothing.
        nisa.scalar_tensor_tensor(
            dst=self.wrong[:, 0, first:end], data=found, op0=nl.multiply, operand0=0.0,
            op1=nl.not_equal, operand1=inaccurate,
        )  # fmt: skip
        # The sum of an accumulator's values times the row's factor is that of the result.
        nisa.scalar_tensor_tensor(
            dst=self.wrong[:, 1, first:end], data=least, op0=nl.multiply,
            operand0=self.smallest_result, op1=nl.greater, operand1=size,
        )  # fmt: skip

    def normalise(self, t: int, on_scalar: bool) -> None:
        """A tile of the result, and the sum of each row: not finite if one of its values is not."""
        tiles = self.tiles
        d = tiles.d
        piece = t // self.tiles_per_piece
        first = piece * self.tiles_per_piece
        end = min(tiles.num_tiles, first + self.tiles_per_piece)
        if t == first:
            self.results.append(
                nl.ndarray((PARTITIONS, (end - first) * d), dtype=self.out.dtype, buffer=nl.sbuf)
            )
        own = tiles.acc[:, t * (d + 1) : t * (d + 1) + d]
        result = self.results[piece]
        normalised = result[:, (t - first) * d : (t - first + 1) * d]
        if on_scalar:
            nisa.activation(
                dst=normalised, op=nl.copy, data=own, scale=self.inverse[:, t : t + 1],
                reduce_op=nl.add, reduce_res=self.result_sum[:, t : t + 1],
                reduce_cmd=nisa.reduce_cmd.reset_reduce,
            )  # fmt: skip
        else:
            nisa.tensor_scalar_reduce(
                dst=normalised, data=own, op0=nl.multiply, operand0=self.inverse[:, t : t + 1],
                reduce_op=nl.add, reduce_res=self.result_sum[:, t : t + 1],
            )  # fmt: skip

    def store(self, piece: int) -> None:
        """Store a piece."""
        share = self.tiles.share
        heads, d = share.num_heads, self.tiles.d
        first = piece * self.piece
        row_tiles = min(self.piece, len(share.row_tiles) - first)
        for run in runs_of(share.row_tiles, first, row_tiles):
            tile, count = run
            begin = (tile - first) * heads * d
            nisa.dma_copy(
                dst=row_tile_view(self.out, share.first_head, heads, share.row_tiles[tile], count),
                src=self.results[piece][:, begin : begin + count * heads * d],
            )

    def write_flag(self, rows: BoundedRows, flag: nl.NkiTensor) -> None:
        """Set flag [1, 1] int32 to 1 if a real row has an inaccurate sum, a result that is not
        finite or one that may have lost flushed products, else to 0.
        """
        self.check(self.last_piece, self.tiles.num_tiles)
        worst = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=worst, op=nl.maximum, data=self.wrong, axis=(1, 2), keepdims=True)
        rows.over_partitions(worst, nl.maximum, flag)
