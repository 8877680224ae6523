"""Elementwise instructions of the Vector Engine (some also run on Scalar and GpSimd)."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..dtypes import INTEGERS, WIDE_INTEGERS, Array
from ..errors import NkiValidationError
from ..ops import Op, op_of
from ..records import Engine
from ..regions import PSUM
from ..tensor import NkiTensor
from .enums import NkiInstruction, engine
from .execute import check_exact_result, finish, fp32, operand_value, put, raw, target
from .operands import (
    check_destination,
    check_not_both_psum,
    check_same_size,
    check_tile,
    check_vector,
    is_tensor,
)

_F32_ONLY: Final = frozenset({"float32"})


def signature(x: object) -> object:
    """What validation depends on: the layout of a tensor, else the type of the operand."""
    return x.v.layout if type(x) is NkiTensor else type(x)


class Elementwise:
    """A validated elementwise instruction: operators, reshapes, engine."""

    __slots__ = ("bitvec", "direct", "engine", "exact", "name", "ndim", "op0", "op1", "reshape")

    def __init__(
        self,
        dst: NkiTensor,
        data: NkiTensor,
        op0: Op,
        op1: Op | None,
        engine_name: Engine,
    ) -> None:
        layout = dst.v.layout
        self.op0 = op0.apply
        self.op1 = None if op1 is None else op1.apply
        self.bitvec = op0.kind == "bitvec"
        self.direct = layout.plain and not self.bitvec
        self.reshape = None if data.v.layout.shape == layout.shape else layout.shape
        self.ndim = layout.ndim
        self.engine = engine_name
        self.exact = False
        self.name = op0.name if op1 is None else f"{op0.name},{op1.name}"


def _choose_engine(
    instruction: str, wanted: Any, allowed: tuple[engine, ...], default: Engine
) -> Engine:
    if not isinstance(wanted, engine) or wanted not in (*allowed, engine.unknown):
        raise NkiValidationError(
            f"{instruction}: engine {wanted}; allowed: "
            f"{', '.join(e.name for e in allowed)} or unknown"
        )
    if wanted is engine.unknown:
        return default
    return wanted.name  # type: ignore[return-value]  # `allowed` holds compute engines only


_tensor_tensor: dict[object, Elementwise] = {}


def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Any,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """Dst = data1 op data2, elementwise; float32 inside, int32/uint32 exact on GpSimd."""
    me = "nisa.tensor_tensor"
    key = (signature(dst), signature(data1), signature(data2), op, engine)
    plan = _tensor_tensor.get(key)
    if plan is None:
        plan = _tensor_tensor[key] = _plan_tensor_tensor(me, dst, data1, data2, op, engine)
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
        put(dst, plan.op0(x, y), me)
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
        _check_bitvec(me, dst=dst, data1=data1, data2=data2)
        chosen = _choose_engine(me, wanted, (engine.vector,), "vector")
    elif found.name == "power":
        chosen = _choose_engine(me, wanted, (engine.gpsimd,), "gpsimd")
    else:
        default: Engine = "gpsimd" if wide and not in_psum else "vector"
        chosen = _choose_engine(me, wanted, (engine.vector, engine.gpsimd), default)
    if chosen == "gpsimd" and in_psum:
        raise NkiValidationError(
            f"{me}: GpSimd cannot access PSUM (op nl.{found.name}); copy the tile to SBUF first"
        )
    plan = Elementwise(dst, data1, found, None, chosen)
    plan.exact = wide and chosen == "gpsimd" and found.kind == "arithmetic"
    plan.direct = plan.direct and not plan.exact
    return plan


def _check_bitvec(me: str, **tiles: Any) -> None:
    for operand, t in tiles.items():
        if is_tensor(t) and t.dtype not in INTEGERS:
            raise NkiValidationError(
                f"{me}: operand {operand} {t.name!r} has dtype {t.dtype}; bitvec operators take "
                "integer dtypes only (reinterpret with .view)"
            )
    widths = {t.v.layout.itemsize for t in tiles.values() if is_tensor(t)}
    if len(widths) > 1:
        raise NkiValidationError(
            f"{me}: bitvec operands have item sizes {sorted(widths)}; they must agree"
        )


_tensor_scalar: dict[object, Elementwise] = {}


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
    """Dst = (data op0 operand0) op1 operand1; operands are scalars or [P, 1] tiles."""
    me = "nisa.tensor_scalar"
    key = (
        signature(dst),
        signature(data),
        op0,
        signature(operand0),
        op1,
        signature(operand1),
        engine,
    )
    plan = _tensor_scalar.get(key)
    if plan is None:
        plan = _plan_tensor_scalar(me, dst, data, op0, operand0, op1, operand1, engine)
        _tensor_scalar[key] = plan
    if plan.bitvec:
        _bitvec_scalar(me, plan, dst, data, operand0, reverse0, operand1, reverse1)
        return finish(plan.engine, "tensor_scalar", (dst,), (data,), plan.name)
    x = fp32(data, me, "data")
    if plan.reshape is not None:
        x = x.reshape(plan.reshape)
    reads: tuple[NkiTensor, ...] = (data,)
    a: Any = None
    if operand0 is not None:
        a = operand_value(operand0, plan.ndim, me, "operand0")
        if type(operand0) is NkiTensor:
            reads = (data, operand0)
    b: Any = None
    if plan.op1 is not None and operand1 is not None:
        b = operand_value(operand1, plan.ndim, me, "operand1")
        if type(operand1) is NkiTensor:
            reads = (*reads, operand1)
            if operand1.storage.buffer is dst.storage.buffer:
                b = b.copy()
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
            check_exact_result(out, dst.dtype, me)
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
    _check_operand(me, "operand0", first, operand0, source.partitions)
    if second is not None:
        _check_operand(me, "operand1", second, operand1, source.partitions)
    in_psum = PSUM in (out.region, source.region)
    if first.kind == "bitvec":
        _check_bitvec(me, dst=dst, data=data, operand0=operand0, operand1=operand1)
        return Elementwise(
            dst, data, first, second, _choose_engine(me, wanted, (engine.vector,), "vector")
        )
    names = (first.name, None if second is None else second.name)
    on_scalar = names in (("multiply", "add"), ("multiply", None), ("add", None))
    allowed: tuple[engine, ...] = (engine.vector,)
    if on_scalar:
        allowed += (engine.scalar,)
    if "rsqrt" in names:
        allowed += (engine.gpsimd,)
    chosen = _choose_engine(me, wanted, allowed, "vector")
    if chosen == "gpsimd" and in_psum:
        raise NkiValidationError(f"{me}: GpSimd cannot access PSUM; copy the tile to SBUF first")
    plan = Elementwise(dst, data, first, second, chosen)
    plan.exact = source.dtype in WIDE_INTEGERS and out.dtype in WIDE_INTEGERS
    return plan


def _check_operand(me: str, operand: str, op: Op, value: Any, partitions: int) -> None:
    if op.unary:
        if value is not None and (is_tensor(value) or value != 0):
            raise NkiValidationError(
                f"{me}: {operand} is {value!r}; unary nl.{op.name} takes None or 0"
            )
        return
    if is_tensor(value):
        dtypes = INTEGERS if op.kind == "bitvec" else _F32_ONLY
        check_vector(me, operand, value, partitions, dtypes)
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise NkiValidationError(
            f"{me}: {operand} is {value!r}; allowed: a number or a [{partitions}, 1] tile"
        )
    if op.kind == "bitvec" and not isinstance(value, (int, np.integer)):
        raise NkiValidationError(f"{me}: {operand} is {value!r}; bitvec operators take integers")


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


_scalar_tensor: dict[object, Elementwise] = {}


def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """Dst = (data op0 operand0) op1 operand1 with a scalar or [P, 1] operand0, a tile operand1."""
    me = "nisa.scalar_tensor_tensor"
    key = (signature(dst), signature(data), op0, signature(operand0), op1, signature(operand1))
    plan = _scalar_tensor.get(key)
    if plan is None:
        plan = _plan_scalar_tensor(me, dst, data, op0, operand0, op1, operand1)
        _scalar_tensor[key] = plan
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
    out = target(dst, me).array if direct else np.empty(shape, np.float32)
    if reverse0:
        plan.op0(a, x, out=out)
    else:
        plan.op0(x, a, out=out)
    if reverse1:
        plan.op1(y, out, out=out)
    else:
        plan.op1(out, y, out=out)
    if not direct:
        put(dst, out, me)
    return finish("vector", "scalar_tensor_tensor", (dst,), reads, plan.name)


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
    _check_operand(me, "operand0", first, operand0, source.partitions)
    return Elementwise(dst, data, first, second, "vector")


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Dst = 1 / data on the Vector Engine."""
    me = "nisa.reciprocal"
    out, source = check_tile(me, "dst", dst), check_tile(me, "data", data)
    check_destination(me, dst)
    check_same_size(me, "data", source, out)
    x = fp32(data, me, "data").reshape(out.shape)
    put(dst, np.divide(np.float32(1), x), me)
    return finish("vector", "reciprocal", (dst,), (data,))
