"""Exact softmax of row tiles, online over steps of keys.

Each query row lies on a partition. For the keys seen so far it has, in fp32,

    neg_shift  -scale * max(score), or minus the sink if that is less
    row_sum    sum of exp(scale * score + neg_shift), the sink's share included
    acc        sum of exp(scale * score + neg_shift) * value

Scores that a row must not see are replaced by MASKED before the maximum is taken. The maximum
never falls below FLOOR, far above MASKED: a row that sees nothing gets weights of exactly 0, and
no difference of infinities arises. FLOOR is a power of two, so that scale * FLOOR is exact.
"""

from dataclasses import dataclass

from .backend import nisa, nl
from .loading import RowTiles, element_bytes
from .tile_schedule import MATMUL_COLUMNS, PARTITIONS, PSUM_BANK_BYTES

FLOOR = -(2.0**103)
"""Scores (before the scale) below about -1e31 count as this."""

MASKED = -3.0e38
"""Score of a key that a row does not see; finite, so that the hardware never meets infinity.

Stays below FLOOR after a multiplication with a k_scale down to 1e-6.
"""

SMALLEST_SUM = 2.0**-60
"""Row sums are at least 1 unless the row saw nothing; this keeps 0 / 0 away."""


@dataclass
class ScoreScale(nl.NKIObject):
    """Factor of the raw scores: numbers, or [rows, 1] fp32 tiles when it is a runtime value."""

    positive: float | nl.NkiTensor
    negative: float | nl.NkiTensor


def cached_scale(k_scale: nl.NkiTensor, scale: float) -> ScoreScale:
    """Factor of scores against stored keys: the softmax scale times k_scale [rows, 1]."""
    positive = nl.ndarray(k_scale.shape, dtype=nl.float32, buffer=nl.sbuf)
    negative = nl.ndarray(k_scale.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=positive, data=k_scale, op0=nl.multiply, operand0=scale)
    nisa.tensor_scalar(dst=negative, data=k_scale, op0=nl.multiply, operand0=-scale)
    return ScoreScale(positive, negative)


@dataclass
class SoftmaxState(nl.NKIObject):
    """State of several row tiles; row tile t owns column t, of acc `width` columns."""

    neg_shift: nl.NkiTensor  # [rows, tiles] fp32
    row_sum: nl.NkiTensor  # [rows, tiles] fp32
    acc: nl.NkiTensor  # [rows, tiles * width] fp32
    width: int

    def acc_of(self, t: int) -> nl.NkiTensor:
        """The accumulator of row tile t, [rows, width]."""
        return self.acc[:, t * self.width : (t + 1) * self.width]


def new_state(rows: int, tiles: int, width: int) -> SoftmaxState:
    """State of tiles that have seen nothing yet; nothing is written until begin or first_step."""
    return SoftmaxState(
        nl.ndarray((rows, tiles), dtype=nl.float32, buffer=nl.sbuf),
        nl.ndarray((rows, tiles), dtype=nl.float32, buffer=nl.sbuf),
        nl.ndarray((rows, tiles * width), dtype=nl.float32, buffer=nl.sbuf),
        width,
    )


def begin(state: SoftmaxState, scale: float, sinks: nl.NkiTensor | None) -> None:
    """State before the first key: empty, or the sink's logit with weight 1.

    sinks: rows x tiles fp32. A sink of -infinity has weight 0 by the first step's correction.
    """
    nisa.memset(dst=state.acc, value=0.0)
    if sinks is None:
        nisa.memset(dst=state.neg_shift, value=-scale * FLOOR)
        nisa.memset(dst=state.row_sum, value=0.0)
        return
    nisa.tensor_scalar(
        dst=state.neg_shift, data=sinks, op0=nl.multiply, operand0=-1.0, op1=nl.minimum,
        operand1=-FLOOR,
    )  # fmt: skip
    nisa.memset(dst=state.row_sum, value=1.0)


def score_tile(
    queries: list[nl.NkiTensor],  # per contraction chunk [<= 128, ...] SBUF
    first_query: int,
    num_queries: int,
    keys: list[nl.NkiTensor],  # per contraction chunk [<= 128, ...] SBUF
    first_key: int,
    num_keys: int,
) -> nl.NkiTensor:
    """Scores [num_queries, num_keys] in PSUM, contracted over all chunks."""
    scores = nl.ndarray((num_queries, num_keys), dtype=nl.float32, buffer=nl.psum)
    for first in range(0, num_keys, MATMUL_COLUMNS):
        last = min(first + MATMUL_COLUMNS, num_keys)
        for chunk in range(len(queries)):
            stationary = queries[chunk]
            moving = keys[chunk]
            nisa.nc_matmul(
                dst=scores[:, first:last],
                stationary=stationary[:, first_query : first_query + num_queries],
                moving=moving[:, first_key + first : first_key + last],
                accumulate=chunk > 0,
            )
    return scores


def masked_maximum(
    scores: nl.NkiTensor,  # [rows, keys] fp32 PSUM
    seen: nl.NkiTensor | None,  # rows x keys uint8, None: every key is seen
    maximum: nl.NkiTensor,  # [rows, 1] fp32, result
) -> nl.NkiTensor:
    """Write each row's largest seen score; return the scores with the unseen ones MASKED."""
    if seen is None:
        nisa.tensor_reduce(dst=maximum, op=nl.maximum, data=scores, axis=1, keepdims=True)
        return scores
    masked = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.select_reduce(
        dst=masked,
        predicate=seen,
        on_true=scores,
        on_false=MASKED,
        reduce_res=maximum,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
        reduce_op=nl.maximum,
    )
    return masked


def transpose_weights(weights: nl.NkiTensor) -> nl.NkiTensor:
    """Weights [rows, keys] as [128, keys / 128 * rows]: key tile j in columns j * rows onwards."""
    rows, keys = weights.shape
    tiles = keys // PARTITIONS
    columns = nl.ndarray((PARTITIONS, tiles * rows), dtype=weights.dtype, buffer=nl.sbuf)
    per_bank = PSUM_BANK_BYTES // (element_bytes(weights.dtype) * rows)
    for first in range(0, tiles, per_bank):
        count = min(per_bank, tiles - first)
        bank = nl.ndarray((PARTITIONS, count * rows), dtype=weights.dtype, buffer=nl.psum)
        for t in range(count):
            nisa.nc_transpose(
                dst=bank[:, t * rows : (t + 1) * rows],
                data=weights[:, (first + t) * PARTITIONS : (first + t + 1) * PARTITIONS],
                engine=nisa.engine.tensor,
            )
        nisa.tensor_copy(dst=columns[:, first * rows : (first + count) * rows], src=bank)
    return columns


def weigh_values(weights: nl.NkiTensor, values: RowTiles) -> nl.NkiTensor:
    """Sum over keys of weight * value for weights [rows, keys], [rows, parts * width] in PSUM.

    parts * width is at most 512: the result of a matmul lies in one PSUM bank.
    """
    rows, keys = weights.shape
    weights_t = transpose_weights(weights)
    total = nl.ndarray((rows, values.parts * values.width), dtype=nl.float32, buffer=nl.psum)
    for tile in range(keys // PARTITIONS):
        nisa.nc_matmul(
            dst=total,
            stationary=weights_t[:, tile * rows : (tile + 1) * rows],
            moving=values.tile(tile),
            accumulate=tile > 0,
        )
    return total


def first_step(
    scores: nl.NkiTensor,  # [rows, keys] fp32 PSUM
    seen: nl.NkiTensor | None,  # rows x keys uint8
    values: RowTiles,
    scale: ScoreScale,
    state: SoftmaxState,
    t: int,
) -> None:
    """Begin the softmax of row tile t with its first step of keys, without a sink."""
    rows, keys = scores.shape
    maximum = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    masked = masked_maximum(scores, seen, maximum)
    shift = state.neg_shift[:, t : t + 1]
    nisa.tensor_scalar(
        dst=shift, data=maximum, op0=nl.maximum, operand0=FLOOR, op1=nl.multiply,
        operand1=scale.negative,
    )  # fmt: skip
    weights = nl.ndarray((rows, keys), dtype=values.rows.dtype, buffer=nl.sbuf)
    nisa.activation(
        dst=weights, op=nl.exp, data=masked, bias=shift, scale=scale.positive,
        reduce_op=nl.add, reduce_res=state.row_sum[:, t : t + 1],
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip
    nisa.tensor_copy(dst=state.acc_of(t), src=weigh_values(weights, values))


def next_step(
    scores: nl.NkiTensor,  # [rows, keys] fp32 PSUM
    seen: nl.NkiTensor | None,  # rows x keys uint8
    values: RowTiles,
    scale: ScoreScale,
    state: SoftmaxState,
    t: int,
) -> None:
    """Continue the softmax of row tile t with further keys."""
    rows, keys = scores.shape
    maximum = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    masked = masked_maximum(scores, seen, maximum)
    old_shift = state.neg_shift[:, t : t + 1]
    shift = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=shift, data=maximum, op0=nl.multiply, operand0=scale.negative, op1=nl.minimum,
        operand1=old_shift,
    )  # fmt: skip
    correction = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=correction, op=nl.exp, data=old_shift, bias=shift, scale=-1.0)
    nisa.tensor_copy(dst=old_shift, src=shift)
    weights = nl.ndarray((rows, keys), dtype=values.rows.dtype, buffer=nl.sbuf)
    step_sum = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=weights, op=nl.exp, data=masked, bias=shift, scale=scale.positive,
        reduce_op=nl.add, reduce_res=step_sum, reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip
    row_sum = state.row_sum[:, t : t + 1]
    nisa.scalar_tensor_tensor(
        dst=row_sum, data=row_sum, op0=nl.multiply, operand0=correction, op1=nl.add,
        operand1=step_sum,
    )  # fmt: skip
    acc = state.acc_of(t)
    nisa.scalar_tensor_tensor(
        dst=acc, data=acc, op0=nl.multiply, operand0=correction, op1=nl.add,
        operand1=weigh_values(weights, values),
    )  # fmt: skip


def normalise(
    acc: nl.NkiTensor,  # [rows, tiles * d] fp32, divided in place
    row_sum: nl.NkiTensor,  # [rows, tiles] fp32, overwritten
    factor: float | nl.NkiTensor,  # of the result: a number or [rows, 1]
) -> None:
    """Divide each tile of acc by its row sum and multiply it by the factor."""
    rows, tiles = row_sum.shape
    nisa.tensor_scalar(dst=row_sum, data=row_sum, op0=nl.maximum, operand0=SMALLEST_SUM)
    nisa.reciprocal(dst=row_sum, data=row_sum)
    nisa.tensor_scalar(dst=row_sum, data=row_sum, op0=nl.multiply, operand0=factor)
    each = row_sum.ap([[tiles, rows], [1, tiles], [0, acc.shape[1] // tiles]])
    nisa.tensor_tensor(dst=acc, data1=acc, data2=each, op=nl.multiply)
