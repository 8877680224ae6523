"""tensor_tensor, scalar_tensor_tensor and reciprocal."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import INTEGERS, WIDE_INTEGERS, Array
from ..errors import NkiValidationError
from ..ops import op_of
from ..records import Engine
from ..regions import PSUM
from ..rules.reductions import check_reduced_dtypes
from ..strict import Plans
from ..tensor import NkiTensor
from .elementwise import (
    Elementwise,
    check_bitvec,
    check_operand,
    choose_engine,
    signature,
)
from .enums import NkiInstruction, engine, reduce_cmd
from .exactness import check_exact_result, check_exact_sums
from .execute import finish, fp32, operand_value, put, raw, target
from .gaps import computed_gaps, is_known, row_gaps
from .legacy import hides_dtype, ignore_dtype
from .operands import check_destination, check_not_both_psum, check_same_size, check_tile
from .reduce import accumulate_vector, check_row_reduction

_tensor_tensor: Plans[Elementwise] = Plans()


def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Any,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """Store dst = data1 op data2, elementwise; float32 inside, int32/uint32 exact on GpSimd."""
    me = "nisa.tensor_tensor"
    key = (signature(dst), signature(data1), signature(data2), op, engine)
    plan = _tensor_tensor.get(key)
    if plan is None:
        plan = _tensor_tensor.made(key, _plan_tensor_tensor, me, dst, data1, data2, op, engine)
    if not (data1.v.known and data2.v.known) and (
        gaps := computed_gaps(me, dst, data1=data1, data2=data2)
    ):
        with gaps:
            return tensor_tensor(dst, data1, data2, op, engine)
    read = raw if plan.bitvec or plan.exact else fp32
    x = read(data1, me, "data1")
    y = read(data2, me, "data2")
    shape = dst.v.layout.shape
    if x.shape != shape:
        x = x.reshape(shape)
    if y.shape != shape:
        y = y.reshape(shape)
    if plan.direct:
        plan.op0(x, y, out=target(dst, me).array)
    else:
        values = plan.op0(x, y)
        if plan.rounded:
            _check_exact(plan.op0, values, dst.dtype, me, x, y)
        put(dst, values, me)
    return finish(plan.engine, "tensor_tensor", (dst,), (data1, data2), plan.name)


def _plan_tensor_tensor(
    me: str, dst: Any, data1: Any, data2: Any, op: Any, wanted: engine
) -> Elementwise:
    out = check_tile(me, "dst", dst)
    first, second = check_tile(me, "data1", data1), check_tile(me, "data2", data2)
    check_destination(me, dst)
    check_same_size(me, "data1", first, out)
    check_same_size(me, "data2", second, out)
    check_not_both_psum(me, data1=first, data2=second)
    found = op_of(me, "op", op)
    if found.unary:
        raise NkiValidationError(f"{me}: op nl.{found.name} is unary; use tensor_scalar")
    layouts = (out, first, second)
    in_psum = any(layout.region is PSUM for layout in layouts)
    wide = all(layout.dtype in WIDE_INTEGERS for layout in layouts)
    if found.kind == "bitvec":
        check_bitvec(me, dst=dst, data1=data1, data2=data2)
        chosen = choose_engine(me, wanted, (engine.vector,), "vector")
    elif found.name == "power":
        chosen = choose_engine(me, wanted, (engine.gpsimd,), "gpsimd")
    else:
        default: Engine = "gpsimd" if wide and not in_psum else "vector"
        chosen = choose_engine(me, wanted, (engine.vector, engine.gpsimd), default)
    if chosen == "gpsimd" and in_psum:
        raise NkiValidationError(
            f"{me}: GpSimd cannot access PSUM (op nl.{found.name}); copy the tile to SBUF first"
        )
    plan = Elementwise(dst, data1, found, None, chosen)
    plan.exact = wide and chosen == "gpsimd" and found.kind == "arithmetic"
    plan.rounded = (
        out.dtype in WIDE_INTEGERS
        and {first.dtype, second.dtype} <= INTEGERS
        and not plan.exact
        and found.kind == "arithmetic"
    )
    plan.direct = plan.direct and not plan.exact
    return plan


_scalar_tensor: Plans[Elementwise] = Plans()


@hides_dtype
def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    name: str | None = None,
    dtype: Any = None,
) -> NkiInstruction:
    """Store dst = (data op0 operand0) op1 operand1; operand0 is a scalar or [P, 1].

    With reduce_op, also the reduction of each row of the result before its cast, into the
    accumulator registers and reduce_res [P, 1].
    """
    me = "nisa.scalar_tensor_tensor"
    key = (signature(dst), signature(data), op0, signature(operand0), op1, signature(operand1))
    plan = _scalar_tensor.get(key)
    if dtype is not None:
        ignore_dtype(me, dtype)
    if plan is None:
        plan = _scalar_tensor.made(
            key, _plan_scalar_tensor, me, dst, data, op0, operand0, op1, operand1
        )
    reduction = None
    if reduce_op is not None or reduce_res is not None:
        reduction = check_row_reduction(me, data, reduce_op, reduce_res, reduce_cmd)
        check_reduced_dtypes(me, reduce_res=reduce_res)
    if not (data.v.known and operand1.v.known and is_known(operand0)):
        operands = {"data": data, "operand0": operand0, "operand1": operand1}
        gaps = (
            computed_gaps(me, dst, **operands)
            if reduction is None
            else row_gaps(me, (dst, reduce_res), **operands)
        )
        if gaps:
            with gaps:
                return scalar_tensor_tensor(
                    dst, data, op0, operand0, op1, operand1, reverse0, reverse1, reduce_cmd,
                    reduce_op, reduce_res,
                )  # fmt: skip
    shape = dst.v.layout.shape
    x = fp32(data, me, "data").reshape(shape)
    y = fp32(operand1, me, "operand1").reshape(shape)
    a: Any = None
    reads: tuple[NkiTensor, ...] = (data, operand1)
    if operand0 is not None:
        a = operand_value(operand0, plan.ndim, me, "operand0")
        if type(operand0) is NkiTensor:
            reads = (data, operand0, operand1)
    assert plan.op1 is not None
    direct = plan.direct and operand1.storage.buffer is not dst.storage.buffer
    direct = direct and reduction is None
    out = target(dst, me).array if direct else np.empty(shape, np.float32)
    if reverse0:
        plan.op0(a, x, out=out)
    else:
        plan.op0(x, a, out=out)
    if plan.rounded:
        inner = out.copy()
        _check_exact(plan.op0, inner, dst.dtype, me, x, a, reverse0)
    if reverse1:
        plan.op1(y, out, out=out)
    else:
        plan.op1(out, y, out=out)
    if not direct:
        if plan.rounded:
            _check_exact(plan.op1, out, dst.dtype, me, inner, y, reverse1)
        put(dst, out, me)
    writes: tuple[NkiTensor, ...] = (dst,)
    if reduction is not None:
        layout = dst.v.layout
        flat = out.reshape(layout.partitions, -1)
        if {data.dtype, operand1.dtype} <= INTEGERS:
            check_exact_sums(flat, data.dtype, "float32", reduction.name, me)
        rows = slice(layout.start, layout.start + layout.partitions)
        assert reduction.reduce is not None
        sums = reduction.reduce(flat, axis=1)
        sums = accumulate_vector(me, rows, sums, reduction, reduce_cmd, None)
        if reduce_res is not None:
            put(reduce_res, sums.reshape(reduce_res.shape), me)
            writes = (dst, reduce_res)
    return finish("vector", "scalar_tensor_tensor", writes, reads, plan.name)


def _check_exact(
    op: Any, values: Array, dtype: str, me: str, x: Any, y: Any, reverse: bool = False
) -> None:
    """Compare an operator's result with what it gives without rounding to fp32."""

    def in_fp64() -> Array:
        wide_x, wide_y = (None if v is None else np.asarray(v, np.float64) for v in (x, y))
        return np.asarray(op(wide_y, wide_x) if reverse else op(wide_x, wide_y))

    check_exact_result(values, dtype, me, in_fp64)


def _plan_scalar_tensor(
    me: str, dst: Any, data: Any, op0: Any, operand0: Any, op1: Any, operand1: Any
) -> Elementwise:
    out, source = check_tile(me, "dst", dst), check_tile(me, "data", data)
    other = check_tile(me, "operand1", operand1)
    check_destination(me, dst)
    check_same_size(me, "data", source, out)
    check_same_size(me, "operand1", other, out)
    check_not_both_psum(me, data=source, operand1=other)
    first, second = op_of(me, "op0", op0), op_of(me, "op1", op1)
    for label, op in (("op0", first), ("op1", second)):
        if op.kind == "bitvec":
            raise NkiValidationError(f"{me}: {label} nl.{op.name}; arithmetic operators only")
    if second.unary:
        raise NkiValidationError(f"{me}: op1 nl.{second.name} is unary; it needs two operands")
    check_operand(me, "operand0", first, operand0, source.partitions, any_dtype=True)
    plan = Elementwise(dst, data, first, second, "vector")
    plan.rounded = out.dtype in WIDE_INTEGERS and {source.dtype, other.dtype} <= INTEGERS
    return plan


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Store dst = 1 / data on the Vector Engine."""
    me = "nisa.reciprocal"
    out, source = check_tile(me, "dst", dst), check_tile(me, "data", data)
    check_destination(me, dst)
    check_same_size(me, "data", source, out)
    if gaps := computed_gaps(me, dst, data=data):
        with gaps:
            return reciprocal(dst, data)
    x = fp32(data, me, "data").reshape(out.shape)
    put(dst, np.divide(np.float32(1), x), me)
    return finish("vector", "reciprocal", (dst,), (data,))
