"""Running results along the free dimension, on the Vector Engine."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..core import current
from ..dtypes import INTEGERS, NUMPY, Array
from ..errors import NkiValidationError
from ..ops import Op, op_of
from ..tensor import NkiTensor
from .elementwise import check_operand
from .enums import NkiInstruction, reduce_cmd
from .exactness import check_exact_result
from .execute import finish, fp32, operand_value, put
from .operands import check_destination, check_not_both_psum, check_same_size, check_tile, is_tensor
from .reduce import accumulate_vector, check_command

_CUMULATIVE: Final = ("add", "subtract", "multiply", "maximum", "minimum")
_CUMULATIVE_DTYPES: Final = frozenset(NUMPY) - {"int32", "uint32", "tfloat32", "bool_"}


def _arithmetic(me: str, parameter: str, op: Any) -> Op:
    found = op_of(me, parameter, op)
    if found.kind == "bitvec" or found.unary:
        raise NkiValidationError(
            f"{me}: {parameter} nl.{found.name}; allowed: binary arithmetic operators"
        )
    return found


def tensor_tensor_scan(
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """dst[:, i] = op1(op0(data0[:, i], dst[:, i - 1]), data1[:, i]), from `initial`, in fp32.

    reverse0 makes data0 the right operand of op0, reverse1 makes data1 the left one of op1.
    """
    me = "nisa.tensor_tensor_scan"
    out = check_tile(me, "dst", dst)
    first, second = check_tile(me, "data0", data0), check_tile(me, "data1", data1)
    check_destination(me, dst)
    check_same_size(me, "data0", first, out)
    check_same_size(me, "data1", second, out)
    check_not_both_psum(me, data0=first, data1=second)
    inner, outer = _arithmetic(me, "op0", op0), _arithmetic(me, "op1", op1)
    check_operand(me, "initial", inner, initial, out.partitions, any_dtype=True)
    a = fp32(data0, me, "data0").reshape(out.partitions, -1)
    b = fp32(data1, me, "data1").reshape(out.partitions, -1)
    start = _column(initial, out.partitions, me, "initial")
    result = _scan(inner, outer, a, b, start, reverse0, reverse1, np.float32)
    if {first.dtype, second.dtype} <= INTEGERS:
        check_exact_result(
            result,
            out.dtype,
            me,
            lambda: _scan(inner, outer, a, b, start, reverse0, reverse1, np.float64),
        )
    put(dst, result.T.reshape(out.shape), me)
    reads = (data0, data1, *((initial,) if is_tensor(initial) else ()))
    return finish("vector", "tensor_tensor_scan", (dst,), reads, f"{inner.name},{outer.name}")


def _scan(
    inner: Op,
    outer: Op,
    a: Array,
    b: Array,
    start: Array,
    reverse0: bool,
    reverse1: bool,
    dtype: Any,
) -> Array:
    """The states [F, P] of a scan over [P, F] data, in float32 or float64."""
    result = np.empty((a.shape[1], a.shape[0]), dtype)
    a, b, state = a.astype(dtype, copy=False), b.astype(dtype, copy=False), start.astype(dtype)
    for i in range(len(result)):
        state = inner.apply(state, a[:, i]) if reverse0 else inner.apply(a[:, i], state)
        state = outer.apply(b[:, i], state) if reverse1 else outer.apply(state, b[:, i])
        result[i] = state
    return result


def _column(value: Any, partitions: int, me: str, operand: str) -> Array:
    """A scalar or [P, 1] operand as [P] float32."""
    column = np.asarray(operand_value(value, 2, me, operand)).reshape(-1)
    return np.broadcast_to(column, (partitions,)).copy()


def tensor_scalar_cumulative(
    dst: NkiTensor,
    src: NkiTensor,
    op0: Any,
    op1: Any,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    name: str | None = None,
) -> NkiInstruction:
    """dst[:, i] = register = op1(op0(src[:, i], imm0), register), from the operator's identity,
    imm1 (load_reduce) or the register's value (reduce).
    """
    me = "nisa.tensor_scalar_cumulative"
    out = check_tile(me, "dst", dst, dtypes=_CUMULATIVE_DTYPES)
    source = check_tile(me, "src", src, dtypes=_CUMULATIVE_DTYPES)
    check_destination(me, dst)
    check_same_size(me, "src", source, out)
    scalar, running = _arithmetic(me, "op0", op0), _arithmetic(me, "op1", op1)
    if running.name not in _CUMULATIVE:
        raise NkiValidationError(f"{me}: op1 nl.{running.name}; allowed: {', '.join(_CUMULATIVE)}")
    check_operand(me, "imm0", scalar, imm0, out.partitions)
    check_command(me, reduce_cmd, imm1)
    if reduce_cmd not in (_RESET_REDUCE, _REDUCE, _LOAD_REDUCE):
        raise NkiValidationError(
            f"{me}: reduce_cmd {reduce_cmd}; allowed: reset_reduce, reduce, load_reduce"
        )
    x = fp32(src, me, "src").reshape(out.partitions, -1)
    x = scalar.apply(x, operand_value(imm0, 2, me, "imm0"))
    rows = slice(out.start, out.start + out.partitions)
    state = np.full(out.partitions, running.identity, np.float32)
    if reduce_cmd is _LOAD_REDUCE:
        state = _column(imm1, out.partitions, me, "imm1")
    elif reduce_cmd is _REDUCE:
        state = current().vector_sum.read(rows, me)
    result = np.empty((out.free, out.partitions), np.float32)
    for i in range(out.free):
        state = result[i] = running.apply(x[:, i], state)
    accumulate_vector(me, rows, state.copy(), running, _RESET_REDUCE, None)
    put(dst, result.T.reshape(out.shape), me)
    reads = (src, *(t for t in (imm0, imm1) if is_tensor(t)))
    return finish(
        "vector", "tensor_scalar_cumulative", (dst,), reads, f"{scalar.name},{running.name}"
    )


_RESET_REDUCE: Final = reduce_cmd.reset_reduce
_REDUCE: Final = reduce_cmd.reduce
_LOAD_REDUCE: Final = reduce_cmd.load_reduce
