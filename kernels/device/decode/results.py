"""Results of decode: normalised columns as rows of the output, and the logarithm of their sums."""

import math

from ...backend import nisa, nl
from ...sizes import FLOOR
from ..softmax import SUM_FLOOR, logarithm
from .batch import Constants, DecodeArguments, numbers_of

LARGEST_SINK = 1e37
"""Sinks beyond this or its negative, -infinity too, are this: 0 * infinity is NaN in PE."""


def store_outputs(
    args: DecodeArguments,
    constants: Constants,
    bank: nl.NkiTensor,  # PSUM [128, 512] fp32
    sums: list[nl.NkiTensor],  # row maxima [1, n], row sums [1, n], then outputs [<= 128, n]
    rows: list[nl.NkiTensor],  # [n, 1]: row of out, query head, KV head
    real: nl.NkiTensor,  # n x d uint8: whether the row is a real query, looked at with several
) -> None:
    """Normalise n <= 128 columns and scatter them as rows of the result."""
    count, d = rows[0].shape[0], args.value_dim
    both = nl.ndarray((count, 2), dtype=nl.float32, buffer=nl.sbuf)
    if d + 2 > bank.shape[1]:
        # Maxima and sums leave the bank before the widest outputs fill it.
        transpose_columns(bank[0:count, 0:2], sums[:2])
        nisa.tensor_copy(dst=both, src=bank[0:count, 0:2])
        transpose_columns(bank[0:count, 0:d], sums[2:])
    else:
        transpose_columns(bank[0:count, 0 : d + 2], [*sums[2:], *sums[:2]])
        nisa.tensor_copy(dst=both, src=bank[0:count, d : d + 2])
    row_max, total = both[:, 0:1], both[:, 1:2]
    sink: nl.NkiTensor | None = None
    if args.sinks is not None:
        sink = numbers_of(args.sinks, rows[1])
        nisa.tensor_scalar(
            dst=sink, data=sink, op0=nl.maximum, operand0=-LARGEST_SINK, op1=nl.minimum,
            operand1=LARGEST_SINK,
        )  # fmt: skip
        weight = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
        # Where this overflows, the sink is all there is: the row is zero then.
        nisa.tensor_tensor(
            dst=weight, data1=sink, data2=scaled_maxima(args, row_max, rows[2]), op=nl.subtract
        )
        nisa.activation(dst=weight, op=nl.exp, data=weight)
        nisa.tensor_tensor(dst=total, data1=total, data2=weight, op=nl.add)
    if args.lse is not None:
        own = row_lse(args, row_max, total, sink, rows[2])
        if args.q.shape[2] > 1:
            own = chosen(own, real[:, 0:1], -math.inf)
        scatter(args.lse, own, rows[0])
    inverse = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=inverse, data=total, op0=nl.maximum, operand0=SUM_FLOOR)
    nisa.reciprocal(dst=inverse, data=inverse)
    if args.v_scales is not None:
        v_scale = numbers_of(args.v_scales, rows[2])
        nisa.tensor_tensor(dst=inverse, data1=inverse, data2=v_scale, op=nl.multiply)
    result: nl.NkiTensor = nl.ndarray((count, d), dtype=args.out.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=bank[0:count, 0:d], op0=nl.multiply, operand0=inverse)
    if args.q.shape[2] > 1:
        result = chosen(result, real, 0.0)
    nisa.dma_copy(
        dst=args.out_rows.ap([[d, count], [1, d]], offset=0, vector_offset=rows[0], indirect_dim=0),
        src=result,
        oob_mode=nisa.oob_mode.skip,
    )


def transpose_columns(dst: nl.NkiTensor, columns: list[nl.NkiTensor]) -> None:
    """Columns [height, n] as rows side by side, PSUM [n, sum of heights]."""
    place = 0
    for each in columns:
        height = each.shape[0]
        nisa.nc_transpose(dst=dst[:, place : place + height], data=each, engine=nisa.engine.tensor)
        place += height


def scaled_maxima(
    args: DecodeArguments,
    row_max: nl.NkiTensor,  # [n, 1] fp32
    kv_heads: nl.NkiTensor,  # [n, 1] int32
) -> nl.NkiTensor:
    """Maxima of the scaled scores, [n, 1] fp32."""
    scaled = nl.ndarray(row_max.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=scaled, data=row_max, op0=nl.multiply, operand0=args.scale)
    if args.score_k_scales is not None:
        k_scale = numbers_of(args.score_k_scales, kv_heads)
        nisa.tensor_tensor(dst=scaled, data1=scaled, data2=k_scale, op=nl.multiply)
    if args.numbers.softcap:
        nisa.tensor_scalar(dst=scaled, data=scaled, op0=nl.subtract, operand0=args.numbers.softcap)
    return scaled


def row_lse(
    args: DecodeArguments,
    row_max: nl.NkiTensor,  # [n, 1] fp32
    total: nl.NkiTensor,  # [n, 1] fp32: sums, sinks included
    sink: nl.NkiTensor | None,  # [n, 1] fp32
    kv_heads: nl.NkiTensor,  # [n, 1] int32
) -> nl.NkiTensor:
    """Logarithm of each row's sum of exp of scaled scores, [n, 1]; -inf where it sees no key."""
    lse = nl.ndarray(row_max.shape, dtype=nl.float32, buffer=nl.sbuf)
    seen = nl.ndarray(row_max.shape, dtype=nl.uint8, buffer=nl.sbuf)
    logarithm(lse, total)
    nisa.tensor_tensor(dst=lse, data1=lse, data2=scaled_maxima(args, row_max, kv_heads), op=nl.add)
    if sink is not None:
        # The sum may have overflowed.
        nisa.tensor_tensor(dst=lse, data1=lse, data2=sink, op=nl.maximum)
    nisa.tensor_scalar(dst=seen, data=row_max, op0=nl.greater, operand0=FLOOR)
    return chosen(lse, seen, -math.inf)


def chosen(numbers: nl.NkiTensor, predicate: nl.NkiTensor, other: float) -> nl.NkiTensor:
    """Numbers where a uint8 predicate of their shape holds, else another one."""
    kept = nl.ndarray(numbers.shape, dtype=numbers.dtype, buffer=nl.sbuf)
    nisa.select_reduce(dst=kept, predicate=predicate, on_true=numbers, on_false=other)
    return kept


def scatter(
    dst: nl.NkiTensor,  # [B, H, T] fp32 HBM
    numbers: nl.NkiTensor,  # [n, 1] fp32
    rows: nl.NkiTensor,  # [n, 1] int32, -1: nowhere
) -> None:
    """Each number to its row of [B * H * T]."""
    size = dst.shape[0] * dst.shape[1] * dst.shape[2]
    nisa.dma_copy(
        dst=dst.reshape((size, 1)).ap(
            [[1, rows.shape[0]], [1, 1]], offset=0, vector_offset=rows, indirect_dim=0
        ),
        src=numbers,
        oob_mode=nisa.oob_mode.skip,
    )
