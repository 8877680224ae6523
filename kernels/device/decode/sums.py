"""Online softmax over spans in sequence: running maxima and sums by two scans per group.

A group has `spans` spans of `rows` query rows. All numbers are broadcast over partitions, so that
they meet the transposed outputs [d, ...] without a transpose. With a state in front,

    shift[s] = max(shift[s - 1] + begins[s], maximum[s]),   begins: 0, or MASKED at a chain's begin
    sums[s]  = exp(scale * (shift[s - 1] + begins[s] - shift[s])) * sums[s - 1] + own sums of s

each in one tensor_tensor_scan, whose first column per row brings in the state of the group before.
Shifts are maxima of raw scores and never below FLOOR, so no difference of infinities arises and a
row that sees nothing gets weights of exactly 0.
"""

from dataclasses import dataclass

from ...backend import nisa, nl
from ...sizes import FLOOR, PARTITIONS
from ..softmax import SUM_FLOOR
from .tensors import ChainFactors


@dataclass
class SumsShape(nl.NKIObject):
    """Static sizes of the running sums."""

    rows: int  # query rows of a span
    d: int
    parts: int  # of at most 128 features


class SpanSums(nl.NKIObject):
    """Shifts and sums of one group. Columns of the states are (row, span), span 0 the state."""

    def __init__(
        self,
        shape: SumsShape,
        spans: int,
        begins: nl.NkiTensor,  # [128, 1 + spans] fp32: MASKED, then 0 or MASKED at a chain's begin
    ) -> None:
        self.shape = shape
        self.spans = spans
        self.columns = spans * shape.rows
        self.height = min(shape.d, PARTITIONS)
        self.pitch = spans + 1
        self.width = shape.rows * self.pitch
        values = (shape.parts + 1) * self.width
        self.begins = begins
        self.maxima = nl.ndarray((PARTITIONS, self.width), dtype=nl.float32, buffer=nl.sbuf)
        self.shift = nl.ndarray((PARTITIONS, self.width), dtype=nl.float32, buffer=nl.sbuf)
        self.factor = nl.ndarray((self.height, self.width), dtype=nl.float32, buffer=nl.sbuf)
        self.own = nl.ndarray((self.height, values), dtype=nl.float32, buffer=nl.sbuf)
        self.sums = nl.ndarray((self.height, values), dtype=nl.float32, buffer=nl.sbuf)

    def write_constants(self) -> None:
        """What brings in the state: no row goes on in the next one."""
        nisa.memset(dst=self.state_column(self.factor, 0, 1), value=0.0)

    def clear(self) -> None:
        """The state that a later group continues: nothing seen."""
        nisa.memset(dst=self.shift, value=FLOOR)
        nisa.memset(dst=self.sums, value=0.0)

    def state_column(self, tile: nl.NkiTensor, span: int, parts: int) -> nl.NkiTensor:
        """Column `span` of every row and part, [partitions, parts * rows]."""
        return tile.ap(
            [[tile.shape[1], tile.shape[0]], [self.pitch, parts * self.shape.rows]], offset=span
        )

    def by_span(self, tile: nl.NkiTensor, height: int, part: int) -> nl.NkiTensor:
        """One part of a state tile without its state columns, in the order (span, row)."""
        return tile.ap(
            [[tile.shape[1], height], [1, self.spans], [self.pitch, self.shape.rows]],
            offset=part * self.width + 1,
        )

    def begin(self, before: "SpanSums", maxima: nl.NkiTensor) -> None:
        """Shifts from the maxima [128, (span, row)], PSUM or SBUF, of the spans."""
        nisa.tensor_copy(
            dst=self.state_column(self.maxima, 0, 1),
            src=before.state_column(before.shift, before.spans, 1),
        )
        nisa.tensor_scalar(
            dst=self.by_span(self.maxima, PARTITIONS, 0), data=maxima, op0=nl.maximum,
            operand0=FLOOR,
        )  # fmt: skip
        rows, pitch = self.shape.rows, self.pitch
        nisa.tensor_tensor_scan(
            dst=self.shift,
            data0=self.begins.ap([[pitch, PARTITIONS], [0, rows], [1, pitch]]),
            data1=self.maxima,
            initial=0.0,
            op0=nl.add,
            op1=nl.maximum,
        )

    def correct(self, factors: ChainFactors) -> None:
        """Factors of the sums before each span."""
        height, rows, spans, pitch = self.height, self.shape.rows, self.spans, self.pitch
        change = nl.ndarray((height, self.columns), dtype=nl.float32, buffer=nl.sbuf)
        pattern = [[self.width, height], [pitch, rows], [1, spans]]
        nisa.tensor_tensor(
            dst=change, data1=self.shift.ap(pattern),
            data2=self.begins.ap([[pitch, height], [0, rows], [1, spans]], offset=1), op=nl.add,
        )  # fmt: skip
        nisa.tensor_tensor(
            dst=change, data1=change, data2=self.shift.ap(pattern, offset=1), op=nl.subtract,
        )  # fmt: skip
        keys = factors.keys
        if keys is not None:
            keys = keys.ap([[self.columns, height], [1, rows], [rows, spans]])
        factors.exponentials(self.factor.ap(pattern, offset=1), change, keys)

    def add(self, before: "SpanSums", own: nl.NkiTensor) -> None:
        """Running sums; own: [height, (part, span, row)] PSUM or SBUF, the last part row sums."""
        parts, rows, pitch = self.shape.parts + 1, self.shape.rows, self.pitch
        nisa.tensor_copy(
            dst=self.state_column(self.own, 0, parts),
            src=before.state_column(before.sums, before.spans, parts),
        )
        width = parts * self.width
        nisa.tensor_copy(
            dst=self.own.ap(
                [[width, self.height], [self.width, parts], [1, self.spans], [pitch, rows]],
                offset=1,
            ),
            src=own,
        )
        nisa.tensor_tensor_scan(
            dst=self.sums,
            data0=self.factor.ap([[self.width, self.height], [0, parts], [1, self.width]]),
            data1=self.own,
            initial=0.0,
            op0=nl.multiply,
            op1=nl.add,
        )

    def normalise(
        self,
        sinks: nl.NkiTensor | None,  # [height, (span, row)] raw scores
        factors: ChainFactors,
        outputs: nl.NkiTensor,  # [height, (part, span, row)] fp32, result
    ) -> None:
        """Sums behind each span divided by their row sums, the sink's share included."""
        height, columns, parts = self.height, self.columns, self.shape.parts
        total = self.by_span(self.sums, height, parts)
        inverse = nl.ndarray((height, columns), dtype=nl.float32, buffer=nl.sbuf)
        if sinks is not None:
            weight = nl.ndarray((height, columns), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(
                dst=weight, data1=sinks, data2=self.by_span(self.shift, height, 0), op=nl.subtract
            )
            keys = factors.keys
            if keys is not None:
                keys = keys[0:height, :]
            factors.exponentials(weight, weight, keys)
            nisa.tensor_tensor(dst=inverse, data1=weight, data2=total, op=nl.add)
            total = inverse
        nisa.tensor_scalar(dst=inverse, data=total, op0=nl.maximum, operand0=SUM_FLOOR)
        nisa.reciprocal(dst=inverse, data=inverse)
        width = (parts + 1) * self.width
        nisa.tensor_tensor(
            dst=outputs,
            data1=self.sums.ap(
                [
                    [width, height], [self.width, parts], [1, self.spans],
                    [self.pitch, self.shape.rows],
                ],
                offset=1,
            ),
            data2=inverse.ap([[columns, height], [0, parts], [1, columns]]),
            op=nl.multiply,
        )  # fmt: skip
