"""Index patterns and selections: iota, affine_select, range_select."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, Final, SupportsIndex

import numpy as np

from ..dtypes import FLOATS, Array
from ..errors import NkiValidationError
from ..language.binary import equal, maximum
from ..ops import NAMES, OPS
from ..tensor import NkiTensor
from .enums import NkiInstruction, reduce_cmd
from .execute import finish, fp32, put
from .operands import SBUF_ONLY, check_destination, check_same_size, check_tile, check_vector
from .reduce import accumulate_vector, check_command
from .vector import signature

FP32_MIN: Final = float(np.finfo(np.float32).min)
_COMPARE: Final = {
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
}
_RANGE_COMPARE: Final = frozenset(_COMPARE) - {"not_equal"}
MAX_PATTERN_DIMS: Final = 4


def _pattern(me: str, pattern: Any, free: int) -> tuple[tuple[int, int], ...]:
    """[[step, num], ...] as tuples; its product must be the destination's free size."""
    pairs = tuple((int(step), int(num)) for step, num in pattern)
    if not 1 <= len(pairs) <= MAX_PATTERN_DIMS:
        raise NkiValidationError(
            f"{me}: pattern {pattern} has {len(pairs)} pairs; allowed: 1..{MAX_PATTERN_DIMS}"
        )
    if prod(num for _, num in pairs) != free:
        raise NkiValidationError(
            f"{me}: pattern {pattern} generates {prod(num for _, num in pairs)} values, the tile "
            f"has {free} elements per partition"
        )
    return pairs


@lru_cache(maxsize=64)
def _affine(pairs: tuple[tuple[int, int], ...], partitions: int, channel_multiplier: int) -> Array:
    """Partition * channel_multiplier + sum(step * index), [partitions, free] int32; read only."""
    free = np.zeros(1, np.int64)
    for step, num in pairs:
        free = (free[:, None] + step * np.arange(num)).reshape(-1)
    values = free + channel_multiplier * np.arange(partitions)[:, None]
    result: Array = values.astype(np.int32)
    result.flags.writeable = False
    return result


def iota(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    offset: SupportsIndex = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> NkiInstruction:
    """dst[p, ...] = offset + p * channel_multiplier + sum(step * index), int32, then cast."""
    me = "nisa.iota"
    out = check_tile(me, "dst", dst, regions=SBUF_ONLY, why="GpSimd reaches SBUF only")
    check_destination(me, dst)
    pairs = _pattern(me, pattern, out.free)
    values = _affine(pairs, out.partitions, int(channel_multiplier)) + np.int32(offset.__index__())
    put(dst, values.reshape(out.shape), me)
    return finish("gpsimd", "iota", (dst,), ())


_selects: dict[object, Any] = {}


def affine_select(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Any = equal,
    offset: SupportsIndex = 0,
    name: str | None = None,
) -> NkiInstruction:
    """Dst = on_true_tile where cmp_op(affine value, 0), else on_false_value."""
    me = "nisa.affine_select"
    pairs = tuple((int(step), int(num)) for step, num in pattern)
    key = (signature(dst), signature(on_true_tile), pairs, cmp_op)
    compare = _selects.get(key)
    if compare is None:
        out = check_tile(me, "dst", dst, regions=SBUF_ONLY, why="GpSimd reaches SBUF only")
        source = check_tile(
            me, "on_true_tile", on_true_tile, regions=SBUF_ONLY, why="GpSimd reaches SBUF only"
        )
        check_destination(me, dst)
        check_same_size(me, "on_true_tile", source, out)
        _pattern(me, pattern, out.free)
        compare = _selects[key] = _comparison(me, "cmp_op", cmp_op, _COMPARE.keys())
    if not isinstance(on_false_value, (int, float, np.number)):
        raise NkiValidationError(f"{me}: on_false_value is {on_false_value!r}; allowed: a number")
    layout = dst.v.layout
    values = _affine(pairs, layout.partitions, int(channel_multiplier))
    keep = compare(values, -offset.__index__()).reshape(layout.shape)
    x = fp32(on_true_tile, me, "on_true_tile").reshape(layout.shape)
    put(dst, np.where(keep, x, np.float32(on_false_value)), me)
    return finish("gpsimd", "affine_select", (dst,), (on_true_tile,))


def _comparison(me: str, parameter: str, op: Any, allowed: Any) -> Any:
    name = NAMES.get(op)
    if name is None or name not in allowed:
        raise NkiValidationError(
            f"{me}: {parameter} is {getattr(op, '__name__', op)!r}; allowed: "
            + ", ".join(f"nl.{a}" for a in sorted(allowed))
        )
    return _COMPARE[name]


_ranges: dict[object, Any] = {}


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
        plan = _ranges[key] = _plan_range(
            me,
            dst,
            on_true_tile,
            comp_op0,
            comp_op1,
            bound0,
            bound1,
            reduce_cmd,
            reduce_res,
            reduce_op,
        )
    compare0, compare1, reduction = plan
    if np.float32(on_false_value) != np.float32(FP32_MIN):
        raise NkiValidationError(
            f"{me}: on_false_value is {on_false_value!r}; allowed: FP32_MIN ({FP32_MIN})"
        )
    layout = dst.v.layout
    if not 0 <= range_start <= 2**24 - layout.free:
        raise NkiValidationError(
            f"{me}: range_start {range_start} + {layout.free}; indices must stay within 0..2**24"
        )
    x = fp32(on_true_tile, me, "on_true_tile").reshape(layout.partitions, layout.free)
    low = fp32(bound0, me, "bound0").reshape(-1, 1)
    high = fp32(bound1, me, "bound1").reshape(-1, 1)
    index = np.arange(range_start, range_start + layout.free, dtype=np.float32)
    keep = compare0(index, low)
    keep &= compare1(index, high)
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
    compare0 = _comparison(me, "comp_op0", comp_op0, _RANGE_COMPARE)
    compare1 = _comparison(me, "comp_op1", comp_op1, _RANGE_COMPARE)
    check_command(me, command, None)
    if command is reduce_cmd.load_reduce:
        raise NkiValidationError(f"{me}: reduce_cmd.load_reduce; range_select has no initial value")
    reduction = maximum_only(me, reduce_op)
    if reduce_res is not None:
        check_vector(me, "reduce_res", reduce_res, source.partitions, FLOATS)
    return compare0, compare1, reduction


def maximum_only(me: str, reduce_op: Any) -> Any:
    """The reduction of the select instructions, which is maximum and nothing else."""
    if NAMES.get(reduce_op) != "maximum":
        raise NkiValidationError(
            f"{me}: reduce_op is {getattr(reduce_op, '__name__', reduce_op)!r}; allowed: nl.maximum"
        )
    return OPS["maximum"]
