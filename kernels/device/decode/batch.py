"""A batch of work tiles: its lists, queries, running softmax, and the results at its end.

Keys lie on partitions: scores are [128 runs, (segment, row, token)], so that one exp serves all
tokens of a tile, weights need no transpose, and P V has the values as stationary operand. Maxima
and sums are the same on all partitions, so that they meet the outputs [d, ...] as they are.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ...backend import nisa, nl
from ...sizes import FLOOR, PARTITIONS, PSUM_BANK_BYTES, ScoreNumbers
from ..loading import element_bytes
from .keys import KeySource


class DecodeSizes(NamedTuple):
    """Sizes that are compiled in, a tuple as kernels take it."""

    tokens: int
    """Tokens of a run."""
    edge_tokens: int
    """Tokens of an edge run."""
    tiles: int
    """Work tiles of a batch."""
    part_segments: int
    """Segments of a part."""


@dataclass
class DecodeArguments:
    """What a batch reads of the kernel's arguments, and sizes that follow."""

    q: nl.NkiTensor  # [B, H, T, d]
    v_cache: nl.NkiTensor | None  # [num_blocks, KV, block_size, dv]; None: the keys' first features
    out: nl.NkiTensor  # [B, H, T, dv]
    lse: nl.NkiTensor | None  # [B, H, T] fp32
    keys: KeySource
    numbers: ScoreNumbers
    sinks: nl.NkiTensor | None  # [1, H] fp32
    k_scales: nl.NkiTensor | None  # [1, KV] fp32
    v_scales: nl.NkiTensor | None
    rows: int  # query rows of a sequence
    segments: int  # of the batch
    tokens: int  # the fields of DecodeSizes
    edge_tokens: int
    tiles: int
    part_segments: int

    @property
    def scale(self) -> float:
        """Factor of raw scores."""
        return self.numbers.of_scores

    @property
    def score_k_scales(self) -> nl.NkiTensor | None:
        """Those of raw scores: a cap has taken them in."""
        return None if self.numbers.softcap else self.k_scales

    @property
    def d(self) -> int:
        """Features of a query and of a key."""
        return self.q.shape[3]

    @property
    def value_dim(self) -> int:
        """Features of a value."""
        return self.out.shape[3]

    @property
    def feature_parts(self) -> list[tuple[int, int]]:
        """(first, number) of the features of values: at most 128 lie on the partitions."""
        width = self.value_dim
        return [(f, min(PARTITIONS, width - f)) for f in range(0, width, PARTITIONS)]

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(first segment, segments) of each part."""
        n = self.part_segments
        return [(first, min(n, self.segments - first)) for first in range(0, self.segments, n)]

    @property
    def query_rows(self) -> nl.NkiTensor:
        """Q as rows [B * H * T, d]."""
        b, h, t, d = self.q.shape
        return self.q.reshape((b * h * t, d))

    @property
    def out_rows(self) -> nl.NkiTensor:
        """The result as rows [B * H * T, d]."""
        b, h, t, d = self.out.shape
        return self.out.reshape((b * h * t, d))


@dataclass
class State:
    """Running maximum, sum and output of some columns: maxima are of raw scores, at least FLOOR."""

    row_max: nl.NkiTensor  # [128, columns] fp32
    row_sum: nl.NkiTensor  # [128, columns]
    outputs: list[nl.NkiTensor]  # [<= 128, columns] of each feature part

    def of(self, first: int, count: int) -> "State":
        """Some of its columns."""
        end = first + count
        outputs = [each[:, first:end] for each in self.outputs]
        return State(self.row_max[:, first:end], self.row_sum[:, first:end], outputs)

    def last(self, count: int) -> "State":
        """Its last columns."""
        return self.of(self.row_max.shape[1] - count, count)

    def clear(self) -> None:
        """Nothing seen."""
        nisa.memset(dst=self.row_max, value=FLOOR)
        nisa.memset(dst=self.row_sum, value=0.0)
        for each in self.outputs:
            nisa.memset(dst=each, value=0.0)

    def sums(self) -> list[nl.NkiTensor]:
        """Row sums and outputs."""
        return [self.row_sum, *self.outputs]


def new_state(args: DecodeArguments, columns: int) -> State:
    """An unwritten state."""

    def new(height: int) -> nl.NkiTensor:
        return nl.ndarray((height, columns), dtype=nl.float32, buffer=nl.sbuf)

    return State(new(PARTITIONS), new(PARTITIONS), [new(n) for _, n in args.feature_parts])


def exponentials(
    dst: nl.NkiTensor,
    differences: nl.NkiTensor,  # raw scores minus maxima, consumed with factors
    scale: float,
    factors: nl.NkiTensor | None,  # scale times k_scale of each difference
) -> None:
    """Weights dst = exp of scaled differences."""
    if factors is None:
        nisa.activation(dst=dst, op=nl.exp, data=differences, scale=scale)
        return
    nisa.tensor_tensor(dst=differences, data1=differences, data2=factors, op=nl.multiply)
    nisa.activation(dst=dst, op=nl.exp, data=differences)


class Constants:
    """Tiles that all batches read."""

    def __init__(self) -> None:
        square = (PARTITIONS, PARTITIONS)
        self.identity = nl.ndarray(square, dtype=nl.float32, buffer=nl.sbuf)
        self.ones = nl.ndarray(square, dtype=nl.float32, buffer=nl.sbuf)
        distance = nl.ndarray(square, dtype=nl.float32, buffer=nl.sbuf)
        nisa.iota(distance, [[-1, PARTITIONS]], offset=0, channel_multiplier=1)
        nisa.memset(dst=self.ones, value=1.0)
        nisa.tensor_scalar(dst=self.identity, data=distance, op0=nl.equal, operand0=0.0)

    def spread(self, numbers: nl.NkiTensor, bank: nl.NkiTensor) -> nl.NkiTensor:
        """A column [n, 1] fp32 as a row on every partition, [128, n] in a PSUM bank."""
        n = numbers.shape[0]
        diagonal = nl.ndarray((n, n), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=diagonal, data=self.identity[0:n, 0:n], op0=nl.multiply, operand0=numbers
        )
        nisa.nc_matmul(
            dst=bank[:, 0:n], stationary=self.ones[0:n, :], moving=diagonal, accumulate=False
        )
        return bank[:, 0:n]

    def column_maxima(self, maxima: nl.NkiTensor, bank: nl.NkiTensor) -> nl.NkiTensor:
        """Largest number of each column of [128, n <= 128], [n, 1]; by way of a PSUM bank."""
        n = maxima.shape[1]
        nisa.nc_transpose(dst=bank[0:n, 0:PARTITIONS], data=maxima, engine=nisa.engine.tensor)
        column = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=column, op=nl.maximum, data=bank[0:n, 0:PARTITIONS], axis=1)
        return column


class Psum:
    """PSUM of one trip, one tensor per slot of a ring."""

    def __init__(self, dtype: str, value_parts: int) -> None:
        width = PSUM_BANK_BYTES // element_bytes(dtype)
        bank = (PARTITIONS, PSUM_BANK_BYTES // 4)
        self.transposed = [
            nl.ndarray((PARTITIONS, width), dtype=dtype, buffer=nl.psum) for _ in range(2)
        ]
        self.scores = [nl.ndarray(bank, dtype=nl.float32, buffer=nl.psum) for _ in range(2)]
        self.edge_scores = nl.ndarray(bank, dtype=nl.float32, buffer=nl.psum)
        quarter = (PARTITIONS, PARTITIONS)
        self.outputs = [
            nl.ndarray(quarter, dtype=nl.float32, buffer=nl.psum)
            for _ in range(max(2, value_parts))
        ]
        self.sums = nl.ndarray(quarter, dtype=nl.float32, buffer=nl.psum)
        self.maxima = [nl.ndarray(quarter, dtype=nl.float32, buffer=nl.psum) for _ in range(2)]
        self.num_transposed = 0
        self.num_scores = 0

    def next_transposed(self) -> nl.NkiTensor:
        """The next tile of transposed chunks."""
        self.num_transposed += 1
        return self.transposed[self.num_transposed % 2]

    def next_scores(self) -> nl.NkiTensor:
        """The next bank of scores."""
        self.num_scores += 1
        return self.scores[self.num_scores % 2]


@dataclass
class Lists:
    """The plan of a batch, in SBUF."""

    indices: nl.NkiTensor  # [128, W + 5 G] int32, see plan.decode_plan.DecodeLists
    masks: nl.NkiTensor  # [128, N + W] fp32
    flags: nl.NkiTensor  # [128, G + G * e + N * T * e] uint8
    tiles: int
    num_parts: int

    def column(self, kind: int, part: int) -> nl.NkiTensor:
        """Indices of a part, [128, 1]: edge runs, rows of q, of out, query heads, KV heads."""
        at = self.tiles + kind * self.num_parts + part
        return self.indices[:, at : at + 1]


def read_lists(arrays: list[nl.NkiTensor], batch: nl.NkiTensor, tiles: int, parts: int) -> Lists:
    """The lists of a batch, whose number is in SBUF [1, 1] int32."""
    loaded = []
    for array in arrays:
        width = array.shape[2]
        tile = nl.ndarray((PARTITIONS, width), dtype=array.dtype, buffer=nl.sbuf)
        nisa.dma_copy(
            dst=tile,
            src=array.ap(
                [[width, PARTITIONS], [1, width]], offset=0, scalar_offset=batch, indirect_dim=0
            ),
        )
        loaded.append(tile)
    return Lists(loaded[0], loaded[1], loaded[2], tiles, parts)


def numbers_of(
    numbers: nl.NkiTensor,  # [1, heads] fp32 HBM
    heads: nl.NkiTensor,  # [n, 1] int32: -1 reads nothing
) -> nl.NkiTensor:
    """One number of each row's head, [n, 1] fp32."""
    column = nl.ndarray(heads.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=column, value=1.0)
    nisa.dma_copy(
        dst=column,
        src=numbers.reshape((numbers.shape[1], 1)).ap(
            [[1, heads.shape[0]], [1, 1]], offset=0, vector_offset=heads, indirect_dim=0
        ),
        oob_mode=nisa.oob_mode.skip,
    )
    return column
