"""The result of the bounded softmax: normalised, checked row by row, stored."""

from .backend import nisa, nl
from .bounded import BLOCK_TILES, BoundedRows
from .loading import row_tile_view, runs_of
from .tile_schedule import PARTITIONS

SMALLEST_SUM = 8.75651076269652e-27
"""exp(-60), 27 nats above the smallest normal fp32 number."""

LARGEST_SUM = 1.0e37


def finish_bounded(
    rows: BoundedRows,
    out: nl.NkiTensor,  # [H, S, d] HBM
    tile_valid: nl.NkiTensor,  # [128, tiles] uint8
    sinks: nl.NkiTensor | None,  # [128, tiles] fp32
    value_scale: float | nl.NkiTensor,
) -> nl.NkiTensor:
    """Normalise and store; [1, 1] int32: whether a real row failed the check.

    Tiles are normalised by ACT and DVE in turn, which also sum each row of the result: an infinity
    or NaN among the values makes the sum one.
    """
    d, tiles = rows.d, rows.num_tiles
    inverse, trusted = row_sums(rows, sinks, tile_valid, value_scale)
    finite = nl.ndarray((PARTITIONS, tiles), dtype=nl.float32, buffer=nl.sbuf)
    share = rows.share
    heads = share.num_heads
    piece = max(1, BLOCK_TILES // heads)
    for first in range(0, len(share.row_tiles), piece):
        row_tiles = min(piece, len(share.row_tiles) - first)
        result = nl.ndarray((PARTITIONS, row_tiles * heads * d), dtype=out.dtype, buffer=nl.sbuf)
        for i in range(row_tiles * heads):
            t = first * heads + i
            own = rows.acc[:, t * (d + 1) : t * (d + 1) + d]
            normalised = result[:, i * d : (i + 1) * d]
            if t % 2 == 0:
                nisa.activation(
                    dst=normalised, op=nl.copy, data=own, scale=inverse[:, t : t + 1],
                    reduce_op=nl.add, reduce_res=finite[:, t : t + 1],
                    reduce_cmd=nisa.reduce_cmd.reset_reduce,
                )  # fmt: skip
            else:
                nisa.tensor_scalar_reduce(
                    dst=normalised, data=own, op0=nl.multiply, operand0=inverse[:, t : t + 1],
                    reduce_op=nl.add, reduce_res=finite[:, t : t + 1],
                )  # fmt: skip
        for run in runs_of(share.row_tiles, first, row_tiles):
            tile, count = run
            begin = (tile - first) * heads * d
            nisa.dma_copy(
                dst=row_tile_view(out, share.first_head, heads, share.row_tiles[tile], count),
                src=result[:, begin : begin + count * heads * d],
            )
    return any_failed(rows, trusted, finite, tile_valid)


def row_sums(
    rows: BoundedRows,
    sinks: nl.NkiTensor | None,  # [128, tiles] fp32
    tile_valid: nl.NkiTensor,  # [128, tiles] uint8
    value_scale: float | nl.NkiTensor,
) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """[128, tiles] fp32 each: the factor of a row's accumulator; 1.0 where its sum is accurate.

    The factor of a padding row is 0. Its query is zero, so its accumulator is finite unless the
    values are extreme; then the row is not finite, which raises the flag like any other.
    """
    d, tiles = rows.d, rows.num_tiles
    shape = (PARTITIONS, tiles)
    own_sum = rows.acc.ap([[tiles * (d + 1), PARTITIONS], [d + 1, tiles], [1, 1]], offset=d)
    total = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=total, src=own_sum)
    trusted = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=trusted, data=total, op0=nl.greater_equal, operand0=SMALLEST_SUM)
    if sinks is not None:
        weight = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        for block in range(rows.num_blocks):
            first = block * BLOCK_TILES
            last = first + rows.tiles_of(block)
            nisa.activation(
                dst=weight[:, first:last], op=nl.exp, data=sinks[:, first:last],
                bias=rows.neg_shift[:, block : block + 1],
            )  # fmt: skip
        nisa.tensor_tensor(dst=total, data1=total, data2=weight, op=nl.add)
    nisa.scalar_tensor_tensor(
        dst=trusted, data=total, op0=nl.less_equal, operand0=LARGEST_SUM, op1=nl.multiply,
        operand1=trusted,
    )  # fmt: skip
    inverse = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=inverse, data=total, op0=nl.maximum, operand0=SMALLEST_SUM)
    nisa.reciprocal(dst=inverse, data=inverse)
    nisa.scalar_tensor_tensor(
        dst=inverse, data=inverse, op0=nl.multiply, operand0=value_scale, op1=nl.multiply,
        operand1=tile_valid,
    )  # fmt: skip
    return inverse, trusted


def any_failed(
    rows: BoundedRows,
    trusted: nl.NkiTensor,  # [128, tiles] fp32: 1.0 where the row sum is accurate
    finite: nl.NkiTensor,  # [128, tiles] fp32: sum of the row's result, overwritten
    tile_valid: nl.NkiTensor,  # [128, tiles] uint8
) -> nl.NkiTensor:
    """[1, 1] int32: 1 if a real row has an inaccurate sum or a result is not finite."""
    nisa.tensor_scalar(
        dst=finite, data=finite, op0=nl.multiply, operand0=0.0, op1=nl.equal, operand1=0.0
    )
    failed = nl.ndarray(finite.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=failed, data=trusted, op0=nl.less, operand0=0.5, op1=nl.multiply, operand1=tile_valid
    )
    # max(inaccurate and real, not finite) = max(failed, 1 - finite)
    nisa.tensor_scalar(
        dst=finite, data=finite, op0=nl.multiply, operand0=-1.0, op1=nl.add, operand1=1.0
    )
    nisa.tensor_tensor(dst=failed, data1=failed, data2=finite, op=nl.maximum)
    worst = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=worst, op=nl.maximum, data=failed, axis=1, keepdims=True)
    flag = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=flag, src=rows.largest(worst))
    return flag
