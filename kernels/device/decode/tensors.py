"""What all groups of slots of paged_decode share: arguments, plan, PSUM banks, per-head factors."""

from dataclasses import dataclass

from ...backend import nisa, nl
from ...sizes import MATMUL_COLUMNS, PARTITIONS, PSUM_BANK_BYTES, PSUM_BANKS, SLOT_BYTES
from ..loading import element_bytes

KEY_BUFFERS = 4
"""SBUF tiles of transposed keys: PE fills one while others are stationary operands."""

MAXIMA_COLUMN = MATMUL_COLUMNS - PARTITIONS
"""Where transposed maxima begin in the bank of the weighted values."""

LARGEST_SINK = 1e37
"""Sinks beyond this or its negative, -infinity too, are this: 0 * infinity is NaN in PE."""


QUADRANT = 32
"""Partitions that an engine can start at are multiples of this."""


def packed_tokens(features: int, tokens: int) -> int:
    """Tokens whose features fill the 128 partitions of one transpose together, else 1."""
    if features % QUADRANT != 0 or PARTITIONS % features != 0:
        return 1
    return min(tokens, PARTITIONS // features)


@dataclass
class DecodePlanTensors(nl.NKIObject):
    """Arrays of plan.DecodePlan in HBM, by the same names, and the core's place in them."""

    gather_rows: nl.NkiTensor
    chains: nl.NkiTensor
    absent: nl.NkiTensor
    edge_seen: nl.NkiTensor
    begins: nl.NkiTensor
    out_rows: nl.NkiTensor
    real_rows: nl.NkiTensor
    key_blocks: nl.NkiTensor | None
    present: nl.NkiTensor | None
    first: int  # entry of the core's first group


def group_part(
    array: nl.NkiTensor,  # [entries, ...] HBM, of the plan
    pattern: list[list[int]],
    entry: int,
    group: nisa.VirtualRegister | None,
) -> nl.NkiTensor:
    """Part of an entry, so many entries after the first or after that of a group."""
    size = 1
    for n in array.shape[1:]:
        size = size * n
    if group is None:
        return array.ap(pattern, offset=entry * size)
    return array.ap(pattern, offset=entry * size, scalar_offset=group, indirect_dim=0)


class GroupList(nl.NKIObject):
    """An array of the plan, a group's part at a time: read ahead, taken over when it is needed.

    A list that a gather reads is free only when the gather is done, which takes longer than the
    next one can wait; so the next list waits in a tile of its own.
    """

    def __init__(
        self,
        array: nl.NkiTensor,  # [entries, ...] HBM
        first: int,  # entry of the core's first group
        tile: nl.NkiTensor,  # SBUF, where it is used
        repeat: bool,  # on every partition the same
    ) -> None:
        self.array = array
        self.first = first
        self.tile = tile
        height, width = tile.shape
        self.pattern = [[width, height], [1, width]]
        if repeat:
            self.pattern = [[0, height], [1, width]]
        self.waiting = nl.ndarray(tile.shape, dtype=array.dtype, buffer=nl.sbuf)

    def fetch_first(self) -> None:
        """Read the list of the first group to where it is used."""
        nisa.dma_copy(dst=self.tile, src=group_part(self.array, self.pattern, self.first, None))

    def fetch(self, group: nisa.VirtualRegister | None, later: int) -> None:
        """Read the list `later` groups after a group; None: the first."""
        nisa.dma_copy(
            dst=self.waiting,
            src=group_part(self.array, self.pattern, self.first + later, group),
        )

    def take(self, first: int, count: int) -> None:
        """Use some columns of the list that was read."""
        end = first + count
        nisa.tensor_copy(
            dst=self.tile[:, first:end], src=self.waiting[:, first:end], engine=nisa.engine.gpsimd
        )

    def take_all(self) -> None:
        """Use the list that was read."""
        self.take(0, self.tile.shape[1])


@dataclass
class DecodeTensors(nl.NKIObject):
    """Arguments of the kernel that slots read, and sizes of a chain."""

    q: nl.NkiTensor  # [B, H, T, d]
    k_cache: nl.NkiTensor  # [num_blocks, KV, block_size, d], or [num_blocks, KV, d, block_size]
    v_cache: nl.NkiTensor  # [num_blocks, KV, block_size, d]
    sinks: nl.NkiTensor | None  # [1, H] fp32
    k_scales: nl.NkiTensor | None  # [1, KV] fp32
    v_scales: nl.NkiTensor | None
    heads: int  # KV heads of a chain
    tokens: int  # tokens of a run
    rows: int  # query rows of a chain


class DecodeBuffers(nl.NKIObject):
    """PSUM banks and constants that all groups use in turn."""

    def __init__(self, tensors: DecodeTensors, slots: int, slot_spans: int) -> None:
        self.dtype = tensors.q.dtype
        per_bank = MATMUL_COLUMNS // (tensors.tokens * tensors.rows * slot_spans)
        self.score_banks = (slots + per_bank - 1) // per_bank
        self.scores = nl.ndarray(
            (PARTITIONS, self.score_banks * MATMUL_COLUMNS), dtype=nl.float32, buffer=nl.psum
        )
        self.transposed: list[nl.NkiTensor] = []
        for _ in range(PSUM_BANKS - self.score_banks - 2):
            self.transposed.append(
                nl.ndarray((PARTITIONS, MATMUL_COLUMNS), dtype=nl.float32, buffer=nl.psum)
            )
        self.sums = nl.ndarray((PARTITIONS, MATMUL_COLUMNS), dtype=nl.float32, buffer=nl.psum)
        # Numbers spread over partitions, then scores of edge tokens.
        self.small = nl.ndarray((PARTITIONS, MATMUL_COLUMNS), dtype=nl.float32, buffer=nl.psum)
        self.keys: list[nl.NkiTensor] = []
        width = PSUM_BANK_BYTES // element_bytes(self.dtype)
        for _ in range(KEY_BUFFERS):
            self.keys.append(nl.ndarray((PARTITIONS, width), dtype=self.dtype, buffer=nl.sbuf))
        self.num_transposed = 0
        self.num_keys = 0
        square = (PARTITIONS, PARTITIONS)
        self.identity = nl.ndarray(square, dtype=nl.float32, buffer=nl.sbuf)
        self.ones = nl.ndarray(square, dtype=nl.float32, buffer=nl.sbuf)
        height = min(tensors.q.shape[3], PARTITIONS)
        self.weight_ones = nl.ndarray((PARTITIONS, height), dtype=self.dtype, buffer=nl.sbuf)
        self.mask_ones = nl.ndarray((1, MATMUL_COLUMNS), dtype=nl.bfloat16, buffer=nl.sbuf)

    def write_constants(self) -> None:
        """Fill the constant tiles, and load the table of exp while nothing waits for it."""
        distance = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
        nisa.iota(distance, [[-1, PARTITIONS]], offset=0, channel_multiplier=1)
        nisa.memset(dst=self.ones, value=1.0)
        table = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=table, op=nl.exp, data=self.ones[0:1, 0:1])
        nisa.memset(dst=self.weight_ones, value=1.0)
        nisa.memset(dst=self.mask_ones, value=1.0)
        nisa.tensor_scalar(dst=self.identity, data=distance, op0=nl.equal, operand0=0.0)

    def next_bank(self, dtype: str) -> nl.NkiTensor:
        """The next PSUM bank of transposes, [128, 2 KiB]."""
        bank = self.transposed[self.num_transposed % len(self.transposed)]
        self.num_transposed = self.num_transposed + 1
        width = PSUM_BANK_BYTES // element_bytes(dtype)
        return bank.ap([[width, PARTITIONS], [1, width]], offset=0, dtype=dtype)

    def small_as(self, dtype: str) -> nl.NkiTensor:
        """The bank of small numbers as another dtype, [128, 2 KiB]."""
        width = PSUM_BANK_BYTES // element_bytes(dtype)
        return self.small.ap([[width, PARTITIONS], [1, width]], offset=0, dtype=dtype)

    def next_keys(self) -> nl.NkiTensor:
        """The next SBUF tile of transposed keys."""
        keys = self.keys[self.num_keys % KEY_BUFFERS]
        self.num_keys = self.num_keys + 1
        return keys

    def chunks_per_bank(self) -> int:
        """Key chunks [128 keys, 128 elements of q's size] whose transposes fill a PSUM bank."""
        return PSUM_BANK_BYTES // (element_bytes(self.dtype) * PARTITIONS)

    def spread(self, numbers: nl.NkiTensor) -> nl.NkiTensor:
        """A column [n, 1] fp32 as a row on every partition, [128, n] in PSUM."""
        n = numbers.shape[0]
        diagonal = nl.ndarray((n, n), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=diagonal, data=self.identity[0:n, 0:n], op0=nl.multiply, operand0=numbers
        )
        result = self.small[:, 0:n]
        nisa.nc_matmul(dst=result, stationary=self.ones[0:n, :], moving=diagonal, accumulate=False)
        return result


class ChainNumbers(nl.NKIObject):
    """One number of each row's head, from an argument [1, heads of the model], fetched ahead."""

    def __init__(self, numbers: nl.NkiTensor, rows: int, repeat: int, spans: int) -> None:
        self.numbers = numbers  # fp32 HBM
        self.rows = rows
        self.repeat = repeat  # rows of a head
        self.spans = spans
        # [(span, row), 1]
        self.column = nl.ndarray((spans * rows, 1), dtype=nl.float32, buffer=nl.sbuf)

    def fetch(self, chains: nl.NkiTensor) -> None:
        """Read those of the spans' chains."""
        rows, repeat = self.rows, self.repeat
        count = rows // repeat
        per_group = self.numbers.reshape((self.numbers.shape[1] // count, count))
        for span in range(self.spans):
            nisa.dma_copy(
                dst=self.column[span * rows : (span + 1) * rows, :],
                src=per_group.ap(
                    [[1, count], [0, repeat]], offset=0,
                    scalar_offset=chains[:, 2 * span + 1 : 2 * span + 2], indirect_dim=0,
                ),
            )  # fmt: skip


class ChainFactors(nl.NKIObject):
    """Scales and sinks of the heads of some spans, None where the kernel has none.

    Scores and shifts are raw: products with stored keys. A sink is divided to be one as well.
    """

    def __init__(
        self, tensors: DecodeTensors, buffers: DecodeBuffers, scale: float, spans: int
    ) -> None:
        self.buffers = buffers
        self.scale = scale
        rows, num_queries = tensors.rows, tensors.q.shape[2]
        per_head = rows // tensors.heads
        self.k_scales: ChainNumbers | None = None
        self.v_scales: ChainNumbers | None = None
        self.raw_sinks: ChainNumbers | None = None
        if tensors.k_scales is not None:
            self.k_scales = ChainNumbers(tensors.k_scales, rows, per_head, spans)
        if tensors.v_scales is not None:
            self.v_scales = ChainNumbers(tensors.v_scales, rows, per_head, spans)
        if tensors.sinks is not None:
            self.raw_sinks = ChainNumbers(tensors.sinks, rows, num_queries, spans)
        # [(span, row), 1]
        self.values: nl.NkiTensor | None = None
        self.sinks: nl.NkiTensor | None = None
        # [128, (span, row)]: softmax scale times k_scale
        self.keys: nl.NkiTensor | None = None

    def fetch(self, chains: nl.NkiTensor) -> None:
        """Read those of the spans; chains [1, 2 * spans] int32 SBUF: chain and head group."""
        if self.k_scales is not None:
            self.k_scales.fetch(chains)
        if self.v_scales is not None:
            self.v_scales.fetch(chains)
        if self.raw_sinks is not None:
            self.raw_sinks.fetch(chains)

    def load(self) -> None:
        """What the spans need of those that were fetched, before the next are."""
        inverse: nl.NkiTensor | None = None
        if self.k_scales is not None:
            column = nl.ndarray(self.k_scales.column.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(
                dst=column, data=self.k_scales.column, op0=nl.multiply, operand0=self.scale
            )
            spread = self.buffers.spread(column)
            self.keys = nl.ndarray(spread.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=self.keys, src=spread)
            inverse = nl.ndarray(column.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.reciprocal(dst=inverse, data=column)
        if self.v_scales is not None:
            self.values = nl.ndarray(self.v_scales.column.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=self.values, src=self.v_scales.column)
        if self.raw_sinks is not None:
            self.sinks = nl.ndarray(self.raw_sinks.column.shape, dtype=nl.float32, buffer=nl.sbuf)
            factor: float | nl.NkiTensor = 1.0 / self.scale
            if inverse is not None:
                factor = inverse
            nisa.tensor_scalar(
                dst=self.sinks, data=self.raw_sinks.column, op0=nl.multiply, operand0=factor,
                op1=nl.maximum, operand1=-LARGEST_SINK,
            )  # fmt: skip
            nisa.tensor_scalar(
                dst=self.sinks, data=self.sinks, op0=nl.minimum, operand0=LARGEST_SINK
            )

    def spread_sinks(self, height: int) -> nl.NkiTensor | None:
        """The sinks on every partition, [height, (span, row)]."""
        if self.sinks is None:
            return None
        spread = self.buffers.spread(self.sinks)
        row = nl.ndarray((height, spread.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=row, src=spread[0:height, :])
        return row

    def exponentials(
        self,
        dst: nl.NkiTensor,
        differences: nl.NkiTensor,  # raw scores minus shifts, consumed
        keys: nl.NkiTensor | None,  # `keys` in the order of the differences
    ) -> None:
        """Weights dst = exp of scaled differences."""
        if keys is None:
            nisa.activation(dst=dst, op=nl.exp, data=differences, scale=self.scale)
            return
        nisa.tensor_tensor(dst=differences, data1=differences, data2=keys, op=nl.multiply)
        nisa.activation(dst=dst, op=nl.exp, data=differences)


def clear(stage: nl.NkiTensor, zeros: nl.NkiTensor, engine: nisa.engine) -> None:
    """Zeros into a staging tile: copied from [128, SLOT_BYTES], or filled in by GpSimd.

    DVE copies 16-bit elements at four times its rate; for the others the words count.
    """
    dtype, size = nl.float32, 4
    if engine == nisa.engine.vector:
        dtype, size = nl.bfloat16, 2
    columns = stage.shape[1] * stored_bytes(stage.dtype) // size
    dst = stage.ap([[columns, PARTITIONS], [1, columns]], dtype=dtype)
    if engine == nisa.engine.gpsimd:
        nisa.memset(dst=dst, value=0.0, engine=engine)
    else:
        zero_columns = SLOT_BYTES // size
        src = zeros.ap([[zero_columns, PARTITIONS], [1, columns]], dtype=dtype)
        nisa.tensor_copy(dst=dst, src=src, engine=engine)


def stored_bytes(dtype: str) -> int:
    """Bytes of one element of a cache."""
    if dtype == nl.float8_e4m3:
        return 1
    return element_bytes(dtype)


def store_rows(
    outputs: nl.NkiTensor,  # [height, (part, span, row)] fp32 from SpanSums.normalise
    buffers: DecodeBuffers,
    value_factor: nl.NkiTensor | None,  # [(span, row), 1]
    real_rows: nl.NkiTensor,  # [(span, row), 1] uint8, looked at with more than one query
    out_rows: nl.NkiTensor,  # [(span, row), 1] int32, -1: not stored
    out: nl.NkiTensor,  # [B, H, T, d]
) -> None:
    """Scatter the outputs of the rows that out_rows names."""
    num_requests, num_q_heads, num_queries, d = out.shape
    columns = out_rows.shape[0]
    bank = buffers.next_bank(nl.float32)
    for part in range(outputs.shape[1] // columns):
        width = min(PARTITIONS, d - part * PARTITIONS)
        nisa.nc_transpose(
            dst=bank[0:columns, part * PARTITIONS : part * PARTITIONS + width],
            data=outputs[0:width, part * columns : (part + 1) * columns],
            engine=nisa.engine.tensor,
        )
    rows = bank[0:columns, 0:d]
    if value_factor is not None:
        scaled = nl.ndarray((columns, d), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=scaled, data=rows, op0=nl.multiply, operand0=value_factor)
        rows = scaled
    result = nl.ndarray((columns, d), dtype=out.dtype, buffer=nl.sbuf)
    if num_queries > 1:
        nisa.select_reduce(
            dst=result, predicate=real_rows.ap([[1, columns], [0, d]]), on_true=rows, on_false=0.0
        )
    else:
        nisa.tensor_copy(dst=result, src=rows)
    every_row = out.reshape((num_requests * num_q_heads * num_queries, d))
    nisa.dma_copy(
        dst=every_row.ap([[d, columns], [1, d]], offset=0, vector_offset=out_rows, indirect_dim=0),
        src=result,
        oob_mode=nisa.oob_mode.skip,
    )
