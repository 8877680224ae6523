"""The result of a share: normalised, checked row by row, stored piece by piece."""

from ..backend import nisa, nl
from ..loading import row_tile_view, runs_of
from ..tile_schedule import PARTITIONS
from .bounded import BoundedRows
from .exact_rows import ExactRows
from .share_tiles import BLOCK_TILES

SMALLEST_SUM = 8.75651076269652e-27
"""exp(-60), 27 nats above the smallest normal fp32 number."""

LARGEST_SUM = 1.0e37

LARGEST_SCALED_SUM = 1.0e31
"""The same under a v_scale, at least 1e-6: their quotient is a normal number, not flushed."""

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
        if value_scale is not None:
            self.value_scale = value_scale
            self.largest_sum = LARGEST_SCALED_SUM
        self.inverse = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        # 1.0 where a real row's sum is not accurate; sum of each row of the result.
        self.inaccurate = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        self.result_sum = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        heads = tiles.share.num_heads
        self.piece = max(1, BLOCK_TILES // heads)
        self.tiles_per_piece = self.piece * heads
        self.results: list[nl.NkiTensor] = []
        # Steps that can be issued: first tile, the one after the last, and up to which tile the
        # factors are to be made before; 0: they are there.
        self.order: list[tuple[int, int, int]] = []
        self.steps = 0
        self.done = 0
        self.ready_tiles = 0

    def add_block(self, block: int) -> None:
        """Add the steps of the pieces that are complete with this block and those before it."""
        complete = block * BLOCK_TILES + self.tiles.tiles_of(block)
        begin = self.ready_tiles
        while self.ready_tiles < self.tiles.num_tiles:
            end = min(self.tiles.num_tiles, self.ready_tiles + self.tiles_per_piece)
            if end > complete:
                break
            for t in range(self.ready_tiles, end, ROW_TILES_PER_STEP):
                self.order.append((t, min(end, t + ROW_TILES_PER_STEP), 0))
            self.ready_tiles = end
        if self.ready_tiles > begin:
            i = self.steps
            first, end, _ = self.order[i]
            self.order[i] = (first, end, self.ready_tiles)
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
        if factors_end > 0:
            self.factors(begin, factors_end)
        for t in range(begin, end):
            self.normalise(t, t % 2 < on_scalar)
        if end == self.tiles.num_tiles or end % self.tiles_per_piece == 0:
            self.store((end - 1) // self.tiles_per_piece)
        self.done = self.done + 1

    def factors(self, first: int, end: int) -> None:
        """The factor of each row's accumulator, and whether its sum is accurate.

        The factor of a padding row is 0. Its query is zero, so its accumulator is finite unless the
        values are extreme; then the row is not finite, which raises the flag like any other.
        """
        shape = (PARTITIONS, end - first)
        total = self.tiles.sums(first, end)
        trusted = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=trusted, data=total, op0=nl.greater_equal, operand0=SMALLEST_SUM)
        if self.sinks is not None:
            weight = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(
                dst=weight, data1=self.sinks[:, first:end],
                data2=self.rows.shifts_of(first, end), op=nl.add,
            )  # fmt: skip
            nisa.activation(dst=weight, op=nl.exp, data=weight)
            nisa.tensor_tensor(dst=weight, data1=total, data2=weight, op=nl.add)
            total = weight
        nisa.scalar_tensor_tensor(
            dst=trusted, data=total, op0=nl.less_equal, operand0=self.largest_sum, op1=nl.multiply,
            operand1=trusted,
        )  # fmt: skip
        valid = self.tile_valid[:, first:end]
        nisa.scalar_tensor_tensor(
            dst=self.inaccurate[:, first:end], data=trusted, op0=nl.less, operand0=0.5,
            op1=nl.multiply, operand1=valid,
        )  # fmt: skip
        inverse = self.inverse[:, first:end]
        nisa.tensor_scalar(dst=inverse, data=total, op0=nl.maximum, operand0=SMALLEST_SUM)
        nisa.reciprocal(dst=inverse, data=inverse)
        nisa.scalar_tensor_tensor(
            dst=inverse, data=inverse, op0=nl.multiply, operand0=self.value_scale, op1=nl.multiply,
            operand1=valid,
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
        """Set flag [1, 1] int32 to 1 if a real row has an inaccurate sum or a result is not finite,
        else to 0.
        """
        # Where the sum is finite and accurate, 0 * sum = 0 = inaccurate.
        right = nl.ndarray(self.result_sum.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(
            dst=right, data=self.result_sum, op0=nl.multiply, operand0=0.0, op1=nl.equal,
            operand1=self.inaccurate,
        )  # fmt: skip
        worst = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=worst, op=nl.minimum, data=right, axis=1, keepdims=True)
        number = rows.over_partitions(worst, nl.minimum)
        nisa.tensor_scalar(
            dst=flag, data=number, op0=nl.multiply, operand0=-1.0, op1=nl.add, operand1=1.0
        )
