"""Exact softmax of one row tile, online over steps of keys.

Each query row lies on a partition. For the keys seen so far it has, in fp32,

    neg_shift  [128, 1]  -scale * max(score)
    row_sum    [128, 1]  sum of exp(scale * score + neg_shift)
    acc        [128, d]  sum of exp(scale * score + neg_shift) * value

Scores that a row must not see are replaced by MASKED before the maximum is taken. The maximum
never falls below FLOOR, far above MASKED: a row that sees nothing gets weights of exactly 0, and
no difference of infinities arises. FLOOR is a power of two, so that scale * FLOOR is exact.
"""

from .backend import nisa, nl
from .loading import RowTiles, element_bytes
from .tile_schedule import MATMUL_COLUMNS, PARTITIONS, PSUM_BANK_BYTES

FLOOR = -(2.0**113)
"""Scores (before the scale) below about -1e34 count as this."""

MASKED = -3.0e38
"""Score of a key that the row does not see; finite, so that the hardware never meets infinity."""

SMALLEST_SUM = 2.0**-60
"""Row sums are at least 1 unless the row saw nothing; this keeps 0 / 0 away."""


def score_tile(q_t: nl.NkiTensor, k_t: nl.NkiTensor) -> nl.NkiTensor:
    """Scores [rows, keys] in PSUM of queries q_t [d, rows] and keys k_t [d, keys]."""
    rows, keys = q_t.shape[1], k_t.shape[1]
    scores = nl.ndarray((rows, keys), dtype=nl.float32, buffer=nl.psum)
    for first in range(0, keys, MATMUL_COLUMNS):
        last = min(first + MATMUL_COLUMNS, keys)
        nisa.nc_matmul(dst=scores[:, first:last], stationary=q_t, moving=k_t[:, first:last])
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
    per_bank = PSUM_BANK_BYTES // (element_bytes(weights) * rows)
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
    scores: nl.NkiTensor,
    seen: nl.NkiTensor | None,
    values: RowTiles,
    scale: float,
    neg_shift: nl.NkiTensor,
    row_sum: nl.NkiTensor,
    acc: nl.NkiTensor,
) -> None:
    """Begin a row tile's softmax with its first step of keys: writes the three state tiles."""
    rows, keys = scores.shape
    maximum = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    masked = masked_maximum(scores, seen, maximum)
    nisa.tensor_scalar(
        dst=neg_shift, data=maximum, op0=nl.maximum, operand0=FLOOR, op1=nl.multiply,
        operand1=-scale,
    )  # fmt: skip
    weights = nl.ndarray((rows, keys), dtype=values.rows.dtype, buffer=nl.sbuf)
    nisa.activation(
        dst=weights, op=nl.exp, data=masked, bias=neg_shift, scale=scale,
        reduce_op=nl.add, reduce_res=row_sum, reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip
    total = weigh_values(weights, values)
    nisa.tensor_copy(dst=acc, src=total)


def next_step(
    scores: nl.NkiTensor,
    seen: nl.NkiTensor | None,
    values: RowTiles,
    scale: float,
    neg_shift: nl.NkiTensor,
    row_sum: nl.NkiTensor,
    acc: nl.NkiTensor,
) -> None:
    """Continue a row tile's softmax with further keys: updates the three state tiles."""
    rows, keys = scores.shape
    maximum = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    masked = masked_maximum(scores, seen, maximum)
    shift = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=shift, data=maximum, op0=nl.multiply, operand0=-scale, op1=nl.minimum,
        operand1=neg_shift,
    )  # fmt: skip
    correction = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=correction, op=nl.exp, data=neg_shift, bias=shift, scale=-1.0)
    nisa.tensor_copy(dst=neg_shift, src=shift)
    weights = nl.ndarray((rows, keys), dtype=values.rows.dtype, buffer=nl.sbuf)
    step_sum = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=weights, op=nl.exp, data=masked, bias=neg_shift, scale=scale,
        reduce_op=nl.add, reduce_res=step_sum, reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip
    nisa.scalar_tensor_tensor(
        dst=row_sum, data=row_sum, op0=nl.multiply, operand0=correction, op1=nl.add,
        operand1=step_sum,
    )  # fmt: skip
    total = weigh_values(weights, values)
    nisa.scalar_tensor_tensor(
        dst=acc, data=acc, op0=nl.multiply, operand0=correction, op1=nl.add, operand1=total
    )


def normalise(row_sum: nl.NkiTensor, acc: nl.NkiTensor, d: int) -> None:
    """Divide acc [128, tiles * d] in place by row_sum [128, tiles], which is overwritten."""
    rows, tiles = row_sum.shape
    nisa.tensor_scalar(dst=row_sum, data=row_sum, op0=nl.maximum, operand0=SMALLEST_SUM)
    nisa.reciprocal(dst=row_sum, data=row_sum)
    each = row_sum.ap([[tiles, rows], [1, tiles], [0, d]])
    nisa.tensor_tensor(dst=acc, data1=acc, data2=each, op=nl.multiply)
