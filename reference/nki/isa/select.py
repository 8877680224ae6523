"""Affine index patterns on GpSimd: iota and affine_select."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, Final

import numpy as np

from ..dtypes import Array, cast
from ..errors import NkiValidationError
from ..language.binary import equal
from ..ops import NAMES
from ..registers import RunTimeValue, integer
from ..strict import Plans
from ..tensor import NkiTensor
from .elementwise import signature
from .enums import NkiInstruction
from .exactness import check_exact
from .execute import finish, fp32, operand_value, put, raw
from .operands import SBUF_ONLY, check_destination, check_same_size, check_tile

COMPARE: Final = {
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
}
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
    if values.min() < -(2**31) or values.max() >= 2**31:
        raise NkiValidationError(
            f"pattern {pairs} with channel_multiplier {channel_multiplier} gives values "
            f"{values.min()}..{values.max()}; the engine computes them in int32"
        )
    result: Array = values.astype(np.int32)
    result.flags.writeable = False
    return result


def iota(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    offset: RunTimeValue | int = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> NkiInstruction:
    """dst[p, ...] = offset + p * channel_multiplier + sum(step * index), int32, then cast."""
    me = "nisa.iota"
    out = check_tile(me, "dst", dst, regions=SBUF_ONLY, why="GpSimd reaches SBUF only")
    check_destination(me, dst)
    pairs = _pattern(me, pattern, out.free)
    values = _affine(pairs, out.partitions, int(channel_multiplier)) + np.int32(
        integer(f"{me}: offset", offset)
    )
    if out.dtype == "float32":
        check_exact(values, values.astype(np.float32), me, "pattern")
    put(dst, values.reshape(out.shape), me)
    return finish("gpsimd", "iota", (dst,), ())


_selects: Plans[Any] = Plans()


def affine_select(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Any = equal,
    offset: RunTimeValue | int = 0,
    name: str | None = None,
) -> NkiInstruction:
    """Store dst = on_true_tile where cmp_op(affine value, 0), else on_false_value."""
    me = "nisa.affine_select"
    pairs = tuple((int(step), int(num)) for step, num in pattern)
    key = (signature(dst), signature(on_true_tile), pairs, cmp_op)
    compare = _selects.get(key)
    if compare is None:
        compare = _selects.made(key, _plan_select, me, dst, pattern, on_true_tile, cmp_op)
    if not isinstance(on_false_value, (int, float, np.number)):
        raise NkiValidationError(f"{me}: on_false_value is {on_false_value!r}; allowed: a number")
    layout = dst.v.layout
    values = _affine(pairs, layout.partitions, int(channel_multiplier))
    keep = compare(values, -integer(f"{me}: offset", offset)).reshape(layout.shape)
    other: Any = np.asarray(operand_value(on_false_value, 2, me, "on_false_value"))
    if on_true_tile.v.layout.dtype == layout.dtype:
        x = raw(on_true_tile, me, "on_true_tile", keep).reshape(layout.shape)
        other = cast(other, layout.dtype)
    else:
        x = fp32(on_true_tile, me, "on_true_tile", keep).reshape(layout.shape)
    put(dst, np.where(keep, x, other), me)
    return finish("gpsimd", "affine_select", (dst,), (on_true_tile,))


def _plan_select(me: str, dst: Any, pattern: Any, on_true_tile: Any, cmp_op: Any) -> Any:
    why = "GpSimd reaches SBUF only"
    out = check_tile(me, "dst", dst, regions=SBUF_ONLY, why=why)
    source = check_tile(me, "on_true_tile", on_true_tile, regions=SBUF_ONLY, why=why)
    check_destination(me, dst)
    check_same_size(me, "on_true_tile", source, out)
    _pattern(me, pattern, out.free)
    return comparison(me, "cmp_op", cmp_op, COMPARE.keys())


def comparison(me: str, parameter: str, op: Any, allowed: Any) -> Any:
    """The comparison ufunc of an operator token; NkiValidationError for another operator."""
    name = NAMES.get(op)
    if name is None or name not in allowed:
        raise NkiValidationError(
            f"{me}: {parameter} is {getattr(op, '__name__', op)!r}; allowed: "
            + ", ".join(f"nl.{a}" for a in sorted(allowed))
        )
    return COMPARE[name]
