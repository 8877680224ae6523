"""merge_attention: attention over the union of N disjoint sets of keys from that over each.

Formula. With lse[n, r] the logarithm of the softmax sum of row r over the n-th set,
    out[r] = sum over n of exp(lse[n, r] - lse[r]) * outs[n, r]
    lse[r] = log(sum over n of exp(lse[n, r]) + exp(sinks[r]))
A row that sees nothing in any set (-inf in all) is zero, its lse -inf, with a sink too.

Supported range and errors. N up to 128 sets, any number of rows R, d up to 512; bf16, fp16 or fp32;
one or two cores. `segattn.kernels.merge_attention` raises ValueError for anything else; the kernel
only asserts shapes.

Loop nest. Tiles of 128 rows, unrolled, in turn on the cores -> sets. Nothing depends on another
tile: the loads of one run beside the sums of the one before.

Layouts. lse as loaded [N, rows], transposed by PE to [rows, N]; outs, sum and result [rows, d].

On-chip memory per partition and tile: N + 1 tiles of d elements and four of N fp32.

Numerics. Everything in fp32, one rounding of the result to the dtype of outs.
"""

import math

from ..backend import nisa, nki, nl
from ..sizes import PARTITIONS
from .prefill.on_chip import psum_bank, sbuf
from .softmax import logarithm

LARGEST_SINK = 1.0e37
"""Sinks beyond this or its negative are this."""

NOTHING = -1.0e38
"""An lse of less is this, so that no difference of infinities arises."""

LARGEST_EXPONENT = 88.0
"""exp of more would overflow."""


@nki.jit
def merge_attention_kernel(
    outs: nl.NkiTensor,  # [N, R, d]
    lses: nl.NkiTensor,  # [N, R] fp32
    sinks: nl.NkiTensor | None,  # [R, 1] fp32
) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Merged attention [R, d] in the dtype of outs, and lse [R, 1] fp32."""
    num_sets, num_rows, d = outs.shape
    assert num_sets <= PARTITIONS, "at most 128 sets of keys"
    out = nl.ndarray((num_rows, d), dtype=outs.dtype, buffer=nl.shared_hbm)
    lse = nl.ndarray((num_rows, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    identity = sbuf((num_sets, num_sets))
    nisa.memset(dst=identity, value=1.0)
    nisa.affine_select(
        dst=identity, pattern=[[1, num_sets]], channel_multiplier=-1, on_true_tile=identity,
        on_false_value=0.0, cmp_op=nl.equal,
    )  # fmt: skip
    core, num_cores = nl.program_id(0), nl.num_programs(0)
    for first in range(core * PARTITIONS, num_rows, num_cores * PARTITIONS):
        rows = slice(first, min(first + PARTITIONS, num_rows))
        sink = None
        if sinks is not None:
            sink = sbuf((rows.stop - first, 1))
            nisa.dma_copy(dst=sink, src=sinks[rows, :])
            nisa.tensor_scalar(
                dst=sink, data=sink, op0=nl.maximum, operand0=-LARGEST_SINK, op1=nl.minimum,
                operand1=LARGEST_SINK,
            )  # fmt: skip
        factors, merged = _factors(lses[:, rows], identity, sink)
        _weighted_sum([outs[n, rows, :] for n in range(num_sets)], factors, out[rows, :])
        nisa.dma_copy(dst=lse[rows, :], src=merged)
    return out, lse


def _factors(
    lses: nl.NkiTensor,  # [N, rows] HBM
    identity: nl.NkiTensor,
    sink: nl.NkiTensor | None,  # [rows, 1]
) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Factor of each set's output, [rows, N], and the merged lse, [rows, 1]."""
    num_sets, count = lses.shape
    loaded, own, factors = sbuf((num_sets, count)), sbuf((count, num_sets)), sbuf((count, num_sets))
    nisa.dma_copy(dst=loaded, src=lses)
    nisa.tensor_scalar(dst=loaded, data=loaded, op0=nl.maximum, operand0=NOTHING)
    transposed = psum_bank()[0:count, 0:num_sets]
    nisa.nc_matmul(dst=transposed, stationary=loaded, moving=identity, accumulate=False)
    nisa.tensor_copy(dst=own, src=transposed)
    largest, total, lse = sbuf((count, 1)), sbuf((count, 1)), sbuf((count, 1))
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=own, axis=1)
    nisa.tensor_scalar(dst=own, data=own, op0=nl.subtract, operand0=largest)
    nisa.activation(dst=factors, op=nl.exp, data=own)
    nisa.tensor_reduce(dst=total, op=nl.add, data=factors, axis=1)
    if sink is not None:
        weight = sbuf((count, 1))
        nisa.tensor_scalar(
            dst=weight, data=sink, op0=nl.subtract, operand0=largest, op1=nl.minimum,
            operand1=LARGEST_EXPONENT,
        )  # fmt: skip
        nisa.activation(dst=weight, op=nl.exp, data=weight)
        nisa.tensor_tensor(dst=total, data1=total, data2=weight, op=nl.add)
    logarithm(lse, total)
    nisa.tensor_tensor(dst=lse, data1=lse, data2=largest, op=nl.add)
    if sink is not None:
        # It may be larger than any sum that fp32 holds.
        nisa.tensor_tensor(dst=lse, data1=lse, data2=sink, op=nl.maximum)
    seen, merged = sbuf((count, 1), nl.uint8), sbuf((count, 1))
    nisa.tensor_scalar(dst=seen, data=largest, op0=nl.greater, operand0=NOTHING)
    nisa.select_reduce(dst=merged, predicate=seen, on_true=lse, on_false=-math.inf)
    nisa.reciprocal(dst=total, data=total)
    nisa.tensor_scalar(dst=factors, data=factors, op0=nl.multiply, operand0=total)
    return factors, merged


def _weighted_sum(
    outs: list[nl.NkiTensor],  # [rows, d] of each set, HBM
    factors: nl.NkiTensor,  # [rows, N]
    out: nl.NkiTensor,  # [rows, d] HBM, result
) -> None:
    """Add up the outputs times their factors."""
    total = sbuf(out.shape)
    for n, each in enumerate(outs):
        loaded = sbuf(each.shape, each.dtype)
        nisa.dma_copy(dst=loaded, src=each)
        factor = factors[:, n : n + 1]
        if n == 0:
            nisa.tensor_scalar(dst=total, data=loaded, op0=nl.multiply, operand0=factor)
        else:
            nisa.scalar_tensor_tensor(
                dst=total, data=loaded, op0=nl.multiply, operand0=factor, op1=nl.add,
                operand1=total,
            )  # fmt: skip
    result = sbuf(out.shape, out.dtype)
    nisa.tensor_copy(dst=result, src=total, engine=nisa.engine.scalar)
    nisa.dma_copy(dst=out, src=result)
