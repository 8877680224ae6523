"""tensor_scalar: one or two operators with scalar or per-partition operands."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import INTEGERS, WIDE_INTEGERS, Array
from ..errors import NkiValidationError
from ..ops import op_of
from ..regions import PSUM
from ..strict import Plans
from ..tensor import NkiTensor
from .elementwise import (
    Elementwise,
    check_bitvec,
    check_operand,
    choose_engine,
    signature,
)
from .enums import NkiInstruction, engine
from .exactness import EXACT, check_exact_result
from .execute import finish, fp32, operand_value, put, raw, target
from .gaps import computed_gaps
from .operands import check_destination, check_same_size, check_tile, is_tensor

_tensor_scalar: Plans[Elementwise] = Plans()


def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """Store dst = (data op0 operand0) op1 operand1; operands are scalars or [P, 1] tiles."""
    me = "nisa.tensor_scalar"
    tiles = type(dst) is NkiTensor and type(data) is NkiTensor
    column0, column1 = type(operand0) is NkiTensor, type(operand1) is NkiTensor
    key = (
        dst.v.layout if tiles else signature(dst),
        data.v.layout if tiles else signature(data),
        op0,
        operand0.v.layout if column0 else type(operand0),
        op1,
        operand1.v.layout if column1 else type(operand1),
        engine,
    )
    plan = _tensor_scalar.get(key)
    if plan is None:
        plan = _tensor_scalar.made(
            key, _plan_tensor_scalar, me, dst, data, op0, operand0, op1, operand1, engine
        )
    known = data.v.known and (not column0 or operand0.v.known)
    known = known and (not column1 or operand1.v.known)
    if not known and (
        gaps := computed_gaps(me, dst, data=data, operand0=operand0, operand1=operand1)
    ):
        with gaps:
            return tensor_scalar(
                dst, data, op0, operand0, reverse0, op1, operand1, reverse1, engine
            )
    if plan.bitvec:
        _bitvec_scalar(me, plan, dst, data, operand0, reverse0, operand1, reverse1)
        tiles_read = (data, *(t for t in (operand0, operand1) if type(t) is NkiTensor))
        return finish(plan.engine, "tensor_scalar", (dst,), tiles_read, plan.name)
    x = fp32(data, me, "data")
    if plan.reshape is not None:
        x = x.reshape(plan.reshape)
    reads: tuple[NkiTensor, ...] = (data,)
    a: Any = operand0
    if column0:
        a = operand_value(operand0, plan.ndim, me, "operand0")
        reads = (data, operand0)
    elif operand0 is not None:
        if type(operand0) is float and -EXACT <= operand0 <= EXACT:
            a = np.float32(operand0)
        else:
            a = plan.constant(operand0, me, "operand0")
    b: Any = operand1
    if column1:
        b = operand_value(operand1, plan.ndim, me, "operand1")
        reads = (*reads, operand1)
        if operand1.storage.buffer is dst.storage.buffer:
            b = b.copy()
    elif operand1 is not None:
        b = plan.constant(operand1, me, "operand1")
    if plan.direct:
        out = target(dst, me).array
    else:
        out = np.empty(dst.v.layout.shape, np.float32)
    if reverse0:
        plan.op0(a, x, out=out)
    else:
        plan.op0(x, a, out=out)
    if plan.op1 is not None:
        if reverse1:
            plan.op1(b, out, out=out)
        else:
            plan.op1(out, b, out=out)
    if not plan.direct:
        if plan.exact:
            _check_exact(plan, out, dst.dtype, me, (x, a, b), (reverse0, reverse1))
        put(dst, out, me)
    return finish(plan.engine, "tensor_scalar", (dst,), reads, plan.name)


def _plan_tensor_scalar(
    me: str, dst: Any, data: Any, op0: Any, operand0: Any, op1: Any, operand1: Any, wanted: engine
) -> Elementwise:
    out, source = check_tile(me, "dst", dst), check_tile(me, "data", data)
    check_destination(me, dst)
    check_same_size(me, "data", source, out)
    first = op_of(me, "op0", op0)
    second = None if op1 is None else op_of(me, "op1", op1)
    if second is None and operand1 is not None:
        raise NkiValidationError(f"{me}: operand1 is given without op1")
    if second is not None and second.kind != first.kind:
        raise NkiValidationError(
            f"{me}: op0 nl.{first.name} is {first.kind}, op1 nl.{second.name} is {second.kind}; "
            "both must be of one kind"
        )
    if first.unary and first.name in ("square", "relu"):
        raise NkiValidationError(
            f"{me}: op0 nl.{first.name} exists on trn3 only; use nisa.activation"
        )
    check_operand(me, "operand0", first, operand0, source.partitions)
    if second is not None:
        check_operand(me, "operand1", second, operand1, source.partitions)
    in_psum = PSUM in (out.region, source.region)
    if first.kind == "bitvec":
        check_bitvec(me, dst=dst, data=data, operand0=operand0, operand1=operand1)
        return Elementwise(
            dst, data, first, second, choose_engine(me, wanted, (engine.vector,), "vector")
        )
    names = (first.name, None if second is None else second.name)
    on_scalar = names in (("multiply", "add"), ("multiply", None), ("add", None))
    allowed: tuple[engine, ...] = (engine.vector,)
    if on_scalar:
        allowed += (engine.scalar,)
    if "rsqrt" in names:
        allowed += (engine.gpsimd,)
    chosen = choose_engine(me, wanted, allowed, "vector")
    if chosen == "gpsimd" and in_psum:
        raise NkiValidationError(f"{me}: GpSimd cannot access PSUM; copy the tile to SBUF first")
    plan = Elementwise(dst, data, first, second, chosen)
    plan.exact = source.dtype in INTEGERS and out.dtype in WIDE_INTEGERS
    return plan


def _check_exact(
    plan: Elementwise,
    out: Array,
    dtype: str,
    me: str,
    operands: tuple[Array, Any, Any],
    reverse: tuple[bool, bool],
) -> None:
    """Compare the result, and what op0 alone gives, with the same in fp64."""
    x, a, b = (None if v is None else np.asarray(v, np.float64) for v in operands)

    def first() -> Array:
        return np.asarray(plan.op0(a, x) if reverse[0] else plan.op0(x, a))

    def second() -> Array:
        assert plan.op1 is not None
        inner = first()
        return np.asarray(plan.op1(b, inner) if reverse[1] else plan.op1(inner, b))

    if plan.op1 is None:
        check_exact_result(out, dtype, me, first)
        return
    check_exact_result(out, dtype, me, second)
    inner = first()
    check_exact_result(inner.astype(np.float32), dtype, me, lambda: inner)


def _bitvec_scalar(
    me: str,
    plan: Elementwise,
    dst: NkiTensor,
    data: NkiTensor,
    operand0: Any,
    reverse0: bool,
    operand1: Any,
    reverse1: bool,
) -> None:
    x = raw(data, me, "data").reshape(dst.shape)
    for op, value, reverse, label in (
        (plan.op0, operand0, reverse0, "operand0"),
        (plan.op1, operand1, reverse1, "operand1"),
    ):
        if op is None:
            continue
        y: Array | None = None
        if is_tensor(value):
            y = raw(value, me, label).reshape((-1,) + (1,) * (plan.ndim - 1)).view(x.dtype)
        elif value is not None:
            y = np.asarray(int(value) & (2 ** (8 * x.itemsize) - 1))
            y = y.astype(f"u{x.itemsize}").view(x.dtype)
        x = op(np.broadcast_to(y, x.shape), x) if reverse and y is not None else op(x, y)
    put(dst, x.view(dst.v.array.dtype), me)
