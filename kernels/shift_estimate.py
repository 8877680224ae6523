"""The fixed shift of each block of queries, estimated from norms."""

from .backend import nisa, nl
from .bounded import BLOCK_TILES, BoundedRows
from .loading import RowTiles, each_element, zero_rows
from .tile_schedule import MATMUL_COLUMNS, PARTITIONS

HEADROOM = 40.0
"""Estimated largest exponent in nats. Up to 36 more, from keys that are longer than the chunk's,
stay finite with 131072 keys; values up to 1e15 keep the sums of P V finite."""

STAGES = 4
"""Steps of an estimate; each takes what the step before has left on another engine."""


class ShiftEstimate(nl.NKIObject):
    """Query columns and shifts of a share's blocks, stage by stage, the last block first.

    The stages of a block are issued between the macros of the blocks before it, so that PE, which
    runs in order, finds the results of DVE and GpSimd that it needs.
    """

    def __init__(
        self,
        rows: BoundedRows,
        q_rows: nl.NkiTensor,  # [128, tiles * d] SBUF; padding rows may be anything
        tile_valid: nl.NkiTensor,  # [128, tiles] uint8: real rows
    ) -> None:
        self.rows = rows
        self.q_rows = q_rows
        self.tile_valid = tile_valid
        # Largest squared norm of the chunk's keys, to be written before stage 2.
        self.longest_key = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
        self.done = 0
        self.steps = rows.num_blocks // 2 * 2 * STAGES
        self.ones = nl.ndarray((1, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=self.ones, value=1.0)
        self.real: list[nl.NkiTensor] = []
        for _ in range(rows.num_blocks):
            self.real.append(q_rows)
        self.norms = nl.ndarray((PARTITIONS, rows.num_blocks), dtype=nl.float32, buffer=nl.sbuf)
        self.roots = nl.ndarray((1, rows.num_blocks), dtype=nl.float32, buffer=nl.sbuf)

    def step(self) -> None:
        """The next stage of the blocks before the last one, two blocks in turn."""
        pair = self.done // (2 * STAGES)
        within = self.done % (2 * STAGES)
        block = self.rows.num_blocks - 2 - 2 * pair - within % 2
        if block >= 0:
            self.stage(block, within // 2)
        self.done = self.done + 1

    def finish_block(self, block: int) -> None:
        """All stages of a block that are left, and what comes before them."""
        behind = self.rows.num_blocks - 2 - block
        needed = behind // 2 * 2 * STAGES + 2 * (STAGES - 1) + behind % 2 + 1
        while behind >= 0 and self.done < needed:
            self.step()

    def stage(self, block: int, stage: int) -> None:
        """One of the STAGES steps of a block."""
        if stage == 0:
            self.zero_padding(block)
        elif stage == 1:
            self.transpose_and_square(block)
        elif stage == 2:
            self.bound(block)
        else:
            self.spread(block)

    def zero_padding(self, block: int) -> None:
        """Make the padding rows of a block zero."""
        d = self.rows.d
        first = block * BLOCK_TILES
        tiles = self.rows.tiles_of(block)
        self.real[block] = zero_rows(
            self.q_rows[:, first * d : (first + tiles) * d],
            each_element(self.tile_valid[:, first : first + tiles], 1, d),
            self.q_rows.dtype,
        )

    def transpose_and_square(self, block: int) -> None:
        """Query columns; per partition the largest squared norm."""
        rows, d = self.rows, self.rows.d
        tiles = rows.tiles_of(block)
        begin = block * MATMUL_COLUMNS
        real = self.real[block]
        rows.transpose(
            RowTiles(real, d, d), 0, tiles, rows.queries[:, begin : begin + tiles * PARTITIONS]
        )
        norm = self.norms[:, block : block + 1]
        if block == rows.num_blocks - 1:
            largest_norm_on_scalar(real, tiles, norm)
        else:
            largest_norm(real, tiles, norm)

    def bound(self, block: int) -> None:
        """max|q| * max|k|, on one partition."""
        norm = self.rows.largest(self.norms[:, block : block + 1])
        product = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=product, data1=norm, data2=self.longest_key, op=nl.multiply)
        nisa.tensor_scalar(
            dst=product, data=product, op0=nl.maximum, operand0=1e-30, op1=nl.minimum, operand1=1e30
        )
        # sqrt(x) = x / sqrt(x): GpSimd has the reciprocal root, ACT would have to change tables.
        root = self.roots[:, block : block + 1]
        nisa.tensor_scalar(
            dst=root, data=product, op0=nl.rsqrt, operand0=0.0, engine=nisa.engine.gpsimd
        )
        nisa.tensor_tensor(
            dst=root, data1=root, data2=product, op=nl.multiply, engine=nisa.engine.gpsimd
        )

    def spread(self, block: int) -> None:
        """The shift on every partition, by a matmul with a row of ones."""
        rows = self.rows
        bound = rows.spare(1, PARTITIONS, 0, 1, nl.float32)
        nisa.nc_matmul(
            dst=bound, stationary=self.ones, moving=self.roots[:, block : block + 1],
            accumulate=False,
        )  # fmt: skip
        nisa.tensor_scalar(
            dst=rows.neg_shift[:, block : block + 1], data=bound, op0=nl.multiply,
            operand0=-rows.scale, op1=nl.add, operand1=HEADROOM,
        )  # fmt: skip


def largest_norm(
    rows: nl.NkiTensor,  # [128, tiles * d] SBUF
    num_tiles: int,
    largest: nl.NkiTensor,  # [128, 1] fp32, result
) -> None:
    """Per partition the largest squared norm of the rows, on GpSimd and DVE."""
    d = rows.shape[1] // num_tiles
    squares = nl.ndarray((PARTITIONS, num_tiles * d), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=squares, data1=rows, data2=rows, op=nl.multiply, engine=nisa.engine.gpsimd
    )
    norms = nl.ndarray((PARTITIONS, num_tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(
        dst=norms, op=nl.add, data=squares.reshape((PARTITIONS, num_tiles, d)), axis=2
    )
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=norms, axis=1, keepdims=True)


def largest_norm_on_scalar(
    rows: nl.NkiTensor,  # [128, tiles * d] SBUF
    num_tiles: int,
    largest: nl.NkiTensor,  # [128, 1] fp32, result
) -> None:
    """largest_norm on ACT, which has nothing else to do before the first exp."""
    d = rows.shape[1] // num_tiles
    norms = nl.ndarray((PARTITIONS, num_tiles), dtype=nl.float32, buffer=nl.sbuf)
    for t in range(num_tiles):
        square = nl.ndarray((PARTITIONS, d), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(
            dst=square, op=nl.square, data=rows[:, t * d : (t + 1) * d],
            reduce_op=nl.add, reduce_res=norms[:, t : t + 1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )  # fmt: skip
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=norms, axis=1, keepdims=True)
