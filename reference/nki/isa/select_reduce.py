"""Selections with a row maximum on the Vector Engine: range_select and select_reduce."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..dtypes import FLOATS, NUMPY
from ..errors import NkiValidationError
from ..language.binary import maximum
from ..ops import NAMES, OPS, Op
from ..registers import integer
from ..rules.operands import check_column_dtype
from ..strict import Plans
from ..tensor import NkiTensor
from .elementwise import signature
from .enums import NkiInstruction, reduce_cmd
from .execute import finish, fp32, operand_value, put, raw
from .operands import (
    check_destination,
    check_not_both_psum,
    check_same_size,
    check_tile,
    check_vector,
    is_tensor,
)
from .reduce import accumulate_vector, check_command
from .select import COMPARE, comparison

FP32_MIN: Final = float(np.finfo(np.float32).min)
_RANGE_COMPARE: Final = frozenset(COMPARE) - {"not_equal"}
_PREDICATES: Final = frozenset({"int8", "uint8", "int16", "uint16"})
_ON_TRUE: Final = frozenset(NUMPY) - {"tfloat32", "int32", "uint32"}

_ranges: Plans[Any] = Plans()


def range_select(
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Any,
    comp_op1: Any,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Any = maximum,
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
    name: str | None = None,
) -> NkiInstruction:
    """Keep elements whose index range_start + i satisfies both comparisons, else FP32_MIN; row
    maximum into the accumulator and reduce_res.
    """
    me = "nisa.range_select"
    key = (
        signature(dst),
        signature(on_true_tile),
        comp_op0,
        comp_op1,
        signature(bound0),
        signature(bound1),
        reduce_cmd,
        signature(reduce_res),
        reduce_op,
    )
    plan = _ranges.get(key)
    if plan is None:
        plan = _ranges.made(
            key, _plan_range, me, dst, on_true_tile, comp_op0, comp_op1, bound0, bound1,
            reduce_cmd, reduce_res, reduce_op,
        )  # fmt: skip
    compare0, compare1, reduction = plan
    if np.float32(on_false_value) != np.float32(FP32_MIN):
        raise NkiValidationError(
            f"{me}: on_false_value is {on_false_value!r}; allowed: FP32_MIN ({FP32_MIN})"
        )
    layout = dst.v.layout
    range_start = integer(f"{me}: range_start", range_start)
    if not 0 <= range_start <= 2**24 - layout.free:
        raise NkiValidationError(
            f"{me}: range_start {range_start} + {layout.free}; indices must stay within 0..2**24"
        )
    low = fp32(bound0, me, "bound0").reshape(-1, 1)
    high = fp32(bound1, me, "bound1").reshape(-1, 1)
    index = np.arange(range_start, range_start + layout.free, dtype=np.float32)
    keep = compare0(index, low)
    keep &= compare1(index, high)
    x = fp32(on_true_tile, me, "on_true_tile", keep).reshape(layout.partitions, layout.free)
    values = np.where(keep, x, np.float32(FP32_MIN))
    sums = np.maximum.reduce(values, axis=1)
    rows = slice(layout.start, layout.start + layout.partitions)
    sums = accumulate_vector(me, rows, sums, reduction, reduce_cmd, None)
    put(dst, values.reshape(layout.shape), me)
    writes: tuple[NkiTensor, ...] = (dst,)
    if reduce_res is not None:
        put(reduce_res, sums.reshape(reduce_res.v.layout.shape), me)
        writes = (dst, reduce_res)
    return finish("vector", "range_select", writes, (on_true_tile, bound0, bound1))


def _plan_range(
    me: str,
    dst: Any,
    on_true: Any,
    comp_op0: Any,
    comp_op1: Any,
    bound0: Any,
    bound1: Any,
    command: Any,
    reduce_res: Any,
    reduce_op: Any,
) -> Any:
    out = check_tile(me, "dst", dst)
    source = check_tile(me, "on_true_tile", on_true, dtypes=FLOATS)
    check_destination(me, dst)
    check_same_size(me, "on_true_tile", source, out)
    for label, bound in (("bound0", bound0), ("bound1", bound1)):
        check_vector(me, label, bound, source.partitions, frozenset({"float32"}))
    compare0 = comparison(me, "comp_op0", comp_op0, _RANGE_COMPARE)
    compare1 = comparison(me, "comp_op1", comp_op1, _RANGE_COMPARE)
    check_command(me, command, None)
    if command is reduce_cmd.load_reduce:
        raise NkiValidationError(f"{me}: reduce_cmd.load_reduce; range_select has no initial value")
    reduction = _maximum_only(me, reduce_op)
    if reduce_res is not None:
        check_vector(me, "reduce_res", reduce_res, source.partitions, FLOATS)
    return compare0, compare1, reduction


def _maximum_only(me: str, reduce_op: Any) -> Op:
    """The reduction of the select instructions, which is maximum and nothing else."""
    if NAMES.get(reduce_op) != "maximum":
        raise NkiValidationError(
            f"{me}: reduce_op is {getattr(reduce_op, '__name__', reduce_op)!r}; allowed: nl.maximum"
        )
    return OPS["maximum"]


_selects: Plans[Op] = Plans()


def select_reduce(
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: Any,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    reduce_op: Any = maximum,
    reverse_pred: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """Store dst = on_true where the predicate is nonzero, else on_false (scalar or [P, 1]); the row
    maximum goes into the accumulator and reduce_res.
    """
    me = "nisa.select_reduce"
    key = (
        signature(dst),
        signature(predicate),
        signature(on_true),
        signature(on_false),
        signature(reduce_res),
        reduce_cmd,
        reduce_op,
    )
    reduction = _selects.get(key)
    if reduction is None:
        reduction = _selects.made(
            key, _plan_select, me, dst, predicate, on_true, on_false, reduce_res, reduce_cmd,
            reduce_op,
        )  # fmt: skip
    layout = dst.v.layout
    where = raw(predicate, me, "predicate").reshape(layout.partitions, -1)
    where = where == 0 if reverse_pred else where != 0
    x = fp32(on_true, me, "on_true", where).reshape(layout.partitions, -1)
    other = operand_value(on_false, 2, me, "on_false")
    values = np.where(where, x, other)
    if reduce_cmd is not _IDLE or reduce_res is not None:
        sums = np.maximum.reduce(values, axis=1)
    else:
        sums = np.zeros(layout.partitions, np.float32)
    rows = slice(layout.start, layout.start + layout.partitions)
    sums = accumulate_vector(me, rows, sums, reduction, reduce_cmd, None)
    put(dst, values.reshape(layout.shape), me)
    writes: tuple[NkiTensor, ...] = (dst,)
    if reduce_res is not None:
        put(reduce_res, sums.reshape(reduce_res.v.layout.shape), me)
        writes = (dst, reduce_res)
    reads = (on_true, predicate, *((on_false,) if is_tensor(on_false) else ()))
    return finish("vector", "select_reduce", writes, reads)


_IDLE: Final = reduce_cmd.idle


def _plan_select(
    me: str,
    dst: Any,
    predicate: Any,
    on_true: Any,
    on_false: Any,
    reduce_res: Any,
    command: Any,
    reduce_op: Any,
) -> Op:
    out = check_tile(me, "dst", dst)
    mask = check_tile(me, "predicate", predicate, dtypes=_PREDICATES)
    source = check_tile(me, "on_true", on_true, dtypes=_ON_TRUE)
    check_destination(me, dst)
    check_same_size(me, "predicate", mask, out)
    check_same_size(me, "on_true", source, out)
    check_not_both_psum(me, on_true=source, predicate=mask)
    if is_tensor(on_false):
        check_vector(me, "on_false", on_false, source.partitions)
        check_column_dtype(me, "on_false", on_false)
    elif not isinstance(on_false, (int, float, np.number)):
        raise NkiValidationError(
            f"{me}: on_false is {on_false!r}; allowed: a number or a [{source.partitions}, 1] tile"
        )
    check_command(me, command, None)
    if reduce_res is not None:
        check_vector(me, "reduce_res", reduce_res, source.partitions, FLOATS)
        if command in (reduce_cmd.idle, reduce_cmd.reset):
            raise NkiValidationError(
                f"{me}: reduce_res with {command}; allowed: reset_reduce, reduce"
            )
    return _maximum_only(me, reduce_op)
