"""Reductions along the free dimensions on the Vector Engine, and its accumulator registers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core import current
from ..dtypes import INTEGERS, Array
from ..errors import NkiValidationError
from ..ops import Op, op_of, reduction_of
from ..rules.reductions import check_reduced_dtypes
from ..strict import Plans
from ..tensor import NkiTensor
from .elementwise import check_operand, signature
from .enums import NkiInstruction, reduce_cmd
from .exactness import check_exact_result, check_exact_sums
from .execute import finish, fp32, operand_value, put, raw
from .gaps import is_known, row_gaps
from .operands import (
    check_destination,
    check_free_dims,
    check_same_size,
    check_tile,
    check_vector,
    is_tensor,
)

_REDUCIBLE = ("add", "multiply", "maximum", "minimum")
_reduces: Plans[Any] = Plans()


def tensor_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    axis: int | tuple[int, ...] | list[int],
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """Reduce the last free dimensions named by `axis`; `negate` multiplies the result by -1."""
    me = "nisa.tensor_reduce"
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    key = (signature(dst), signature(data), op, axes, negate)
    plan = _reduces.get(key)
    if plan is None:
        plan = _reduces.made(key, _plan_reduce, me, dst, op, data, axes, negate)
    if not data.v.known and (gaps := row_gaps(me, (dst,), data=data)):
        with gaps:
            return tensor_reduce(dst, op, data, axis, negate, keepdims)
    found, reduced_axes, bitvec = plan
    x = raw(data, me, "data") if bitvec else fp32(data, me, "data")
    values = found.reduce(x, axis=reduced_axes)
    if data.v.layout.dtype in INTEGERS:
        rows = x.reshape(x.shape[: reduced_axes[0]] + (-1,))
        check_exact_sums(rows, data.dtype, dst.dtype, found.name, me)
    if negate:
        values = np.negative(values)
    put(dst, values.reshape(dst.v.layout.shape), me)
    return finish("vector", "tensor_reduce", (dst,), (data,), found.name)


def _plan_reduce(
    me: str, dst: Any, op: Any, data: Any, axes: tuple[int, ...], negate: bool
) -> tuple[Any, tuple[int, ...], bool]:
    out, source = check_tile(me, "dst", dst), check_tile(me, "data", data)
    check_destination(me, dst)
    found = reduction_of(me, op)
    positive = tuple(sorted(a + source.ndim if a < 0 else a for a in axes))
    if not positive or positive != tuple(range(positive[0], source.ndim)) or positive[0] < 1:
        raise NkiValidationError(
            f"{me}: axis {axes} of a tile with {source.ndim} dimensions; allowed: the last free "
            "dimensions, contiguous, without the partition dimension 0"
        )
    kept = source.free
    for a in positive:
        kept //= source.shape[a]
    if out.partitions != source.partitions or out.free != kept:
        raise NkiValidationError(
            f"{me}: dst has shape {out.shape}; needed {source.partitions} partitions and {kept} "
            f"elements per partition for data {source.shape} over axis {axes}"
        )
    bitvec = found.kind == "bitvec"
    if bitvec:
        if negate:
            raise NkiValidationError(f"{me}: negate goes with arithmetic operators only")
        for label, layout in (("dst", out), ("data", source)):
            if layout.dtype not in INTEGERS:
                raise NkiValidationError(
                    f"{me}: operand {label} has dtype {layout.dtype}; bitvec operators take "
                    "integer dtypes"
                )
    return found, positive, bitvec


def accumulate_vector(
    me: str,
    rows: slice,
    values: Array,
    op: Any,
    command: reduce_cmd,
    init: Any,
) -> Array:
    """Run a reduce command of the Vector Engine: combine `values` [P] with its registers."""
    registers = current().vector_sum
    if command is reduce_cmd.idle:
        # documented: an idle instruction may still change the registers
        registers.forget(rows)
        return values
    if command is reduce_cmd.reset:
        registers.store(rows, op.identity)
        return values
    if command is reduce_cmd.reduce:
        values = op.apply(registers.read(rows, me), values)
    elif command is reduce_cmd.load_reduce:
        values = op.apply(init, values)
    registers.store(rows, values)
    return values


_scalar_reduces: Plans[Any] = Plans()


def tensor_scalar_reduce(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """Store dst = data op0 operand0, and its reduction over the free dimensions."""
    me = "nisa.tensor_scalar_reduce"
    key = (
        signature(dst),
        signature(data),
        op0,
        signature(operand0),
        reduce_op,
        signature(reduce_res),
        reverse0,
        reduce_cmd,
    )
    plan = _scalar_reduces.get(key)
    if plan is None:
        plan = _scalar_reduces.made(
            key, _plan_scalar_reduce, me, dst, data, op0, operand0, reduce_op, reduce_res,
            reverse0, reduce_cmd, reduce_init,
        )  # fmt: skip
    if not (data.v.known and is_known(operand0)) and (
        gaps := row_gaps(me, (dst, reduce_res), data=data, operand0=operand0)
    ):
        with gaps:
            return tensor_scalar_reduce(
                dst,
                data,
                op0,
                operand0,
                reduce_op,
                reduce_res,
                reverse0,
                reduce_cmd,
                reduce_init,
                reduce_res_negate,
            )
    check_reduced_dtypes(me, dst=dst, data=data, reduce_res=reduce_res)
    first, reduction = plan
    layout = dst.v.layout
    x = fp32(data, me, "data").reshape(layout.shape)
    a = None if operand0 is None else operand_value(operand0, layout.ndim, me, "operand0")
    values = first.apply(x, a)
    init = None
    if reduce_init is not None:
        init = operand_value(reduce_init, 2, me, "reduce_init")
        init = init.reshape(-1) if init.ndim else init
    flat = values.reshape(layout.partitions, -1)
    sums = reduction.reduce(flat, axis=1)
    if data.v.layout.dtype in INTEGERS:
        _check_exact(first, values, dst.dtype, me, x, a)
        check_exact_sums(flat, data.dtype, "float32", reduction.name, me)
    rows = slice(layout.start, layout.start + layout.partitions)
    sums = accumulate_vector(me, rows, sums, reduction, reduce_cmd, init)
    put(dst, values, me)
    writes: tuple[NkiTensor, ...] = (dst,)
    if reduce_res is not None:
        put(reduce_res, (-sums if reduce_res_negate else sums).reshape(reduce_res.shape), me)
        writes = (dst, reduce_res)
    reads = (data, *(t for t in (operand0, reduce_init) if is_tensor(t)))
    return finish("vector", "tensor_scalar_reduce", writes, reads, f"{first.name},{reduction.name}")


def _check_exact(op: Op, values: Array, dtype: str, me: str, x: Array, a: Any) -> None:
    """Compare an operator's result with what it gives without rounding to fp32."""

    def in_fp64() -> Array:
        return np.asarray(op.apply(x.astype(np.float64), None if a is None else np.float64(a)))

    check_exact_result(values, dtype, me, in_fp64)


def _plan_scalar_reduce(
    me: str,
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: Any,
    reverse0: bool,
    command: Any,
    init: Any,
) -> tuple[Any, Any]:
    out, source = check_tile(me, "dst", dst), check_tile(me, "data", data)
    check_destination(me, dst)
    check_same_size(me, "data", source, out)
    check_free_dims(me, dst=out, data=source)
    first, reduction = op_of(me, "op0", op0), reduction_of(me, reduce_op)
    if first.kind == "bitvec":
        raise NkiValidationError(f"{me}: op0 nl.{first.name}; arithmetic operators only")
    if reduction.name not in _REDUCIBLE:
        raise NkiValidationError(
            f"{me}: reduce_op nl.{reduction.name}; allowed: {', '.join(_REDUCIBLE)}"
        )
    if reverse0:
        raise NkiValidationError(f"{me}: reverse0=True is not supported; allowed: False")
    check_operand(me, "operand0", first, operand0, source.partitions)
    if reduce_res is not None:
        check_vector(me, "reduce_res", reduce_res, source.partitions)
    check_command(me, command, init)
    if command not in (reduce_cmd.reset_reduce, reduce_cmd.reduce, reduce_cmd.load_reduce):
        raise NkiValidationError(f"{me}: {command}; allowed: reset_reduce, reduce, load_reduce")
    if init is not None:
        if command is not reduce_cmd.load_reduce:
            raise NkiValidationError(
                f"{me}: reduce_init with {command}; it goes with reduce_cmd.load_reduce only"
            )
        check_operand(me, "reduce_init", reduction, init, source.partitions)
    return first, reduction


def check_command(me: str, command: Any, init: Any) -> None:
    """load_reduce goes with an initial value, the other commands do not need one."""
    if not isinstance(command, reduce_cmd):
        raise NkiValidationError(
            f"{me}: reduce_cmd {command!r}; allowed: members of nisa.reduce_cmd"
        )
    if command is reduce_cmd.load_reduce and init is None:
        raise NkiValidationError(f"{me}: reduce_cmd.load_reduce needs an initial value")


def check_row_reduction(me: str, data: NkiTensor, op: Any, result: Any, command: Any) -> Op:
    """The operator that reduces the rows of a result; NkiValidationError for what none takes."""
    found = reduction_of(me, op)
    if found.name not in _REDUCIBLE:
        raise NkiValidationError(
            f"{me}: reduce_op nl.{found.name}; allowed: {', '.join(_REDUCIBLE)}"
        )
    if command not in (reduce_cmd.reset_reduce, reduce_cmd.reduce):
        raise NkiValidationError(f"{me}: {command}; allowed: reset_reduce, reduce")
    if result is not None:
        check_vector(me, "reduce_res", result, data.v.layout.partitions)
    return found
