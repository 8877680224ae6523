"""The result of a q_group: normalised, checked row by row, stored piece by piece."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..loading import row_tile_view, runs_of
from ..softmax import logarithm
from ..tile_schedule import Q_BLOCK_TILES
from .on_chip import over_partitions, sbuf, transpose
from .query_tiles import QueryTiles
from .softmax_base import Softmax

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

TILES_PER_PORTION = 2
"""q_tiles that one portion normalises."""


@dataclass
class RowFacts:
    """What a q_group's rows are, beside their queries."""

    valid: nl.NkiTensor
    """[128, q_tiles] uint8: real rows."""
    sinks: nl.NkiTensor | None
    """[128, q_tiles] fp32."""
    value_scale: nl.NkiTensor | None
    """[128, 1] fp32: factor of the accumulators."""
    may_see_nothing: bool = False
    """Whether a real row may see no key: it sees none of the chunk's."""


class GroupResult:
    """Turns the accumulators of a q_group into its rows of the result and its flag.

    A *piece* is the row tiles of about one q_block, all heads of them: what one DMA stores. Its
    portions are issued beside those of later q_blocks, or all at the end.
    """

    def __init__(
        self,
        softmax: Softmax,
        queries: QueryTiles,
        rows: RowFacts,
        out: nl.NkiTensor,
        lse: nl.NkiTensor | None,  # [H, S] fp32
    ) -> None:
        group = queries.group
        shape = (PARTITIONS, group.num_tiles)
        self._softmax, self._queries, self._rows, self._out = softmax, queries, rows, out
        self._lse = lse
        self._value_scale: float | nl.NkiTensor = 1.0
        self._largest_sum = LARGEST_SUM
        self._smallest_result = SMALLEST_RESULT
        if rows.value_scale is not None:
            self._value_scale = rows.value_scale
            self._largest_sum = LARGEST_SCALED_SUM
            self._smallest_result = SMALLEST_SCALED_RESULT
        self._row_sum = sbuf(shape)
        self._sink_weight = sbuf(shape)
        # One over the row_sums, which include the sink; the factors of the accumulators; the sum
        # of each row of the result.
        self._reciprocal = sbuf(shape)
        self._factor = sbuf(shape)
        self._result_sum = sbuf(shape)
        # 1.0 where a real row's sum is not accurate or its result not finite, and where its
        # result may lack products.
        self._wrong = sbuf((PARTITIONS, 2, group.num_tiles))
        self._row_tiles = max(1, Q_BLOCK_TILES // group.num_heads)
        self._piece_tiles = self._row_tiles * group.num_heads
        self._ready = 0
        self._queue: list[Iterator[object]] = []
        self.on_scalar = softmax.is_exact
        """Whether ACT normalises every second q_tile: beside the bounded softmax it is busy."""

    def put_into(self, queue: list[Iterator[object]]) -> None:
        """Put the work into this queue when their q_blocks are complete."""
        self._queue = queue

    def block_done(self, block: int) -> None:
        """Take the pieces that are complete with this q_block and those before it."""
        group = self._queries.group
        end = block * Q_BLOCK_TILES + group.tiles_of(block)
        if end < group.num_tiles:
            end = end // self._piece_tiles * self._piece_tiles
        if end > self._ready:
            self._queue.append(self._portions(self._ready, end))
            self._ready = end

    def _portions(self, begin: int, end: int) -> Iterator[None]:
        """Normalise and store the pieces of some q_tiles."""
        self._queries.copy_row_sums(begin, end, self._row_sum)
        if self._rows.sinks is not None:
            # A portion before the factors: DVE waits for ACT.
            tiles = range(begin, end)
            self._softmax.weigh_sinks(self._queries, self._rows.sinks, tiles, self._sink_weight)
        yield
        self._factors(begin, end)
        for first in range(begin, end, self._piece_tiles):
            last = min(first + self._piece_tiles, end)
            piece = sbuf((PARTITIONS, (last - first) * self._queries.value_dim), self._out.dtype)
            for t in range(first, last):
                self._normalise(t, piece, t - first)
                if (t + 1) % TILES_PER_PORTION == 0 or t + 1 == last:
                    yield
            self._store(first // self._piece_tiles, piece)
        if not self._softmax.is_exact:
            self._check(begin, end)

    def _factors(self, first: int, end: int) -> None:
        """The factor of each row's accumulator.

        That of a padding row is 0. Its query is zero, so its accumulator is finite unless the
        values are extreme; then the row is not finite, which raises the flag like any other.
        """
        total = self._row_sum[:, first:end]
        if self._rows.sinks is not None:
            with_sink = sbuf((PARTITIONS, end - first))
            weight = self._sink_weight[:, first:end]
            nisa.tensor_tensor(dst=with_sink, data1=total, data2=weight, op=nl.add)
            total = with_sink
        own = self._reciprocal[:, first:end]
        nisa.tensor_scalar(dst=own, data=total, op0=nl.maximum, operand0=SMALLEST_SUM)
        nisa.reciprocal(dst=own, data=own)
        nisa.scalar_tensor_tensor(
            dst=self._factor[:, first:end], data=own, op0=nl.multiply, operand0=self._value_scale,
            op1=nl.multiply, operand1=self._rows.valid[:, first:end],
        )  # fmt: skip

    def _check(self, first: int, end: int) -> None:
        """What is wrong with the normalised rows of some q_tiles; see bounded_softmax.py."""
        shape = (PARTITIONS, end - first)
        total = self._row_sum[:, first:end]
        found = self._result_sum[:, first:end]
        inaccurate, least, size = sbuf(shape), sbuf(shape), sbuf(shape)
        nisa.scalar_tensor_tensor(
            dst=inaccurate, data=total, op0=nl.greater_equal, operand0=SMALLEST_SUM,
            op1=nl.multiply, operand1=self._reciprocal[:, first:end],
        )  # fmt: skip
        nisa.scalar_tensor_tensor(
            dst=least, data=total, op0=nl.less, operand0=SAFE_SUM, op1=nl.multiply,
            operand1=self._factor[:, first:end],
        )  # fmt: skip
        nisa.scalar_tensor_tensor(
            dst=inaccurate, data=inaccurate, op0=nl.less, operand0=1.0 / self._largest_sum,
            op1=nl.multiply, operand1=self._rows.valid[:, first:end],
        )  # fmt: skip
        nisa.scalar_tensor_tensor(
            dst=size, data=found, op0=nl.multiply, operand0=-1.0, op1=nl.maximum, operand1=found
        )
        # Where the sum is finite and accurate, 0 * sum = 0 = inaccurate; NaN equals nothing.
        nisa.scalar_tensor_tensor(
            dst=self._wrong[:, 0, first:end], data=found, op0=nl.multiply, operand0=0.0,
            op1=nl.not_equal, operand1=inaccurate,
        )  # fmt: skip
        # The sum of an accumulator's values times the row's factor is that of the result.
        nisa.scalar_tensor_tensor(
            dst=self._wrong[:, 1, first:end], data=least, op0=nl.multiply,
            operand0=self._smallest_result, op1=nl.greater, operand1=size,
        )  # fmt: skip

    def _normalise(self, t: int, piece: nl.NkiTensor, place: int) -> None:
        """A q_tile of the result, and the sum of each row, which shows what is not finite."""
        d = self._queries.value_dim
        own = self._queries.accumulator(t)[:, 0:d]
        result = piece[:, place * d : (place + 1) * d]
        factor, total = self._factor[:, t : t + 1], self._result_sum[:, t : t + 1]
        if self.on_scalar and t % 2 == 0:
            nisa.activation(
                dst=result, op=nl.copy, data=own, scale=factor, reduce_op=nl.add,
                reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce,
            )  # fmt: skip
        else:
            nisa.tensor_scalar_reduce(
                dst=result, data=own, op0=nl.multiply, operand0=factor, reduce_op=nl.add,
                reduce_res=total,
            )  # fmt: skip

    def _store(self, piece: int, result: nl.NkiTensor) -> None:
        """Store the rows of a piece that this core has to store."""
        group = self._queries.group
        width = group.num_heads * self._queries.value_dim
        first = piece * self._row_tiles
        count = min(self._row_tiles, group.num_stored - first)
        if count <= 0:
            return
        for tile, length in runs_of(group.row_tiles, first, count):
            begin = (tile - first) * width
            nisa.dma_copy(
                dst=row_tile_view(
                    self._out, group.first_head, group.num_heads, group.row_tiles[tile], length
                ),
                src=result[:, begin : begin + length * width],
            )

    def finish(self) -> None:
        """Everything that is left, on ACT and DVE in turn."""
        self.on_scalar = True
        while self._queue:
            for _ in self._queue.pop(0):
                pass
        if self._lse is not None:
            self._store_lse(self._lse)

    def _store_lse(self, lse: nl.NkiTensor) -> None:
        """Logarithm of each row's sum, without its shift, of the rows this core has to store."""
        group, total = self._queries.group, self._queries.group.num_tiles
        every, kept = sbuf((PARTITIONS, total)), sbuf((PARTITIONS, total))
        logarithm(every, self._reciprocal)
        # -log(1 / sum) - shift
        for t, neg_max in enumerate(self._queries.neg_max):
            own = every[:, t : t + 1]
            nisa.tensor_scalar(
                dst=own, data=own, op0=nl.multiply, operand0=-1.0, op1=nl.subtract,
                operand1=neg_max,
            )  # fmt: skip
        if self._rows.sinks is not None:
            # The sum may have overflowed.
            nisa.tensor_tensor(dst=every, data1=every, data2=self._rows.sinks, op=nl.maximum)
        if self._softmax.numbers.softcap:
            nisa.tensor_scalar(
                dst=every, data=every, op0=nl.subtract, operand0=self._softmax.numbers.softcap
            )
        shown = self._rows.valid
        if self._rows.may_see_nothing:
            # A row that sees a key has a weight of 1.
            shown = sbuf(shown.shape, nl.uint8)
            nisa.scalar_tensor_tensor(
                dst=shown, data=self._row_sum, op0=nl.greater, operand0=0.0, op1=nl.multiply,
                operand1=self._rows.valid,
            )  # fmt: skip
        nisa.select_reduce(dst=kept, predicate=shown, on_true=every, on_false=-math.inf)
        rows = sbuf((total, PARTITIONS))
        transpose([kept], rows, nisa.engine.vector)
        for i in range(group.num_stored):
            first, head = group.row_tiles[i] * PARTITIONS, group.first_head
            nisa.dma_copy(
                dst=lse[head : head + group.num_heads, first : first + PARTITIONS],
                src=rows[i * group.num_heads : (i + 1) * group.num_heads, :],
            )

    def write_flag(self, flag: nl.NkiTensor) -> None:
        """Set flag [1, 1] int32 to 1 if a real row has an inaccurate sum, a result that is not
        finite or one that may have lost flushed products, else to 0.
        """
        worst = sbuf((PARTITIONS, 1))
        nisa.tensor_reduce(dst=worst, op=nl.maximum, data=self._wrong, axis=(1, 2), keepdims=True)
        over_partitions(worst, nl.maximum, flag)
