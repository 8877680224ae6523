"""Per-partition statistics and the eight largest values, on the Vector Engine."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..dtypes import Array
from ..errors import NkiValidationError
from ..layout import Layout
from ..tensor import NkiTensor
from .enums import NkiInstruction
from .execute import finish, fp32, put
from .operands import check_destination, check_same_size, check_tile

BN_STATS_FMAX: Final = 512
WIDTH8: Final = 8
MAX8_FREE: Final = 16384
_INDEX: Final = frozenset({"uint16", "uint32"})


def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst[P, 6]: count, mean, variance * count of the even, then of the odd elements."""
    me = "nisa.bn_stats"
    out, source = check_tile(me, "dst", dst), check_tile(me, "data", data)
    check_destination(me, dst)
    if source.free > BN_STATS_FMAX:
        raise NkiValidationError(
            f"{me}: operand data has {source.free} elements per partition; limit {BN_STATS_FMAX}"
        )
    _check_width(me, "dst", out, source, 6)
    x = fp32(data, me, "data").reshape(source.partitions, -1)
    result = np.zeros((source.partitions, 6), np.float32)
    for half in range(2):
        part = x[:, half::2]
        if part.shape[1]:
            mean = part.mean(axis=1, dtype=np.float32)
            result[:, 3 * half] = part.shape[1]
            result[:, 3 * half + 1] = mean
            result[:, 3 * half + 2] = ((part - mean[:, None]) ** 2).sum(axis=1)
    put(dst, result.reshape(out.shape), me)
    return finish("vector", "bn_stats", (dst,), (data,))


def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst[P, 2]: mean and population variance from (count, mean, variance * count) triples."""
    me = "nisa.bn_aggr"
    out, source = check_tile(me, "dst", dst), check_tile(me, "data", data)
    check_destination(me, dst)
    if source.free % 3:
        raise NkiValidationError(
            f"{me}: operand data has {source.free} elements per partition; allowed: multiples of 3"
        )
    _check_width(me, "dst", out, source, 2)
    triples = fp32(data, me, "data").reshape(source.partitions, -1, 3)
    count, mean, spread = triples[..., 0], triples[..., 1], triples[..., 2]
    total = count.sum(axis=1)
    center = (count * mean).sum(axis=1) / total
    variance = (spread + count * (mean - center[:, None]) ** 2).sum(axis=1) / total
    put(dst, np.stack([center, variance], axis=1).reshape(out.shape), me)
    return finish("vector", "bn_aggr", (dst,), (data,))


def max8(dst: NkiTensor, src: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst[P, 8]: the eight largest values of each partition, descending."""
    me = "nisa.max8"
    out, source = check_tile(me, "dst", dst), _searched(me, "src", src)
    check_destination(me, dst)
    _check_width(me, "dst", out, source, WIDTH8)
    x = fp32(src, me, "src").reshape(source.partitions, -1)
    put(dst, np.sort(x, axis=1)[:, : -WIDTH8 - 1 : -1].reshape(out.shape), me)
    return finish("vector", "max8", (dst,), (src,))


def nc_find_index8(
    dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None
) -> NkiInstruction:
    """dst[P, 8]: where each of 8 values occurs first; equal values take successive occurrences in
    ascending columns; all ones when a value is missing.
    """
    me = "nisa.nc_find_index8"
    out = check_tile(me, "dst", dst, dtypes=_INDEX)
    source, wanted = _searched(me, "data", data), check_tile(me, "vals", vals)
    check_destination(me, dst)
    _check_width(me, "dst", out, source, WIDTH8)
    _check_width(me, "vals", wanted, source, WIDTH8)
    found = _match(me, data, vals, range(WIDTH8))
    put(dst, found.astype(out.np_dtype).reshape(out.shape), me)
    return finish("vector", "nc_find_index8", (dst,), (data, vals))


def nc_match_replace8(
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Store dst = data with the matches of 8 values replaced by imm, and their indices in dst_idx.

    Values are matched from column 7 down, so equal values fill dst_idx in descending order.
    """
    me = "nisa.nc_match_replace8"
    out = check_tile(me, "dst", dst)
    source, wanted = _searched(me, "data", data), check_tile(me, "vals", vals)
    check_destination(me, dst)
    check_same_size(me, "data", source, out)
    _check_width(me, "vals", wanted, source, WIDTH8)
    if not isinstance(imm, (int, float, np.number)):
        raise NkiValidationError(f"{me}: imm {imm!r}; allowed: a number")
    found = _match(me, data, vals, range(WIDTH8 - 1, -1, -1))
    x = fp32(data, me, "data").reshape(source.partitions, -1).copy()
    rows, columns = np.nonzero(found >= 0)
    x[rows, found[rows, columns]] = imm
    put(dst, x.reshape(out.shape), me)
    writes: tuple[NkiTensor, ...] = (dst,)
    if dst_idx is not None:
        index = check_tile(me, "dst_idx", dst_idx, dtypes=_INDEX)
        _check_width(me, "dst_idx", index, source, WIDTH8)
        put(dst_idx, found.astype(index.np_dtype).reshape(index.shape), me)
        writes = (dst, dst_idx)
    return finish("vector", "nc_match_replace8", writes, (data, vals))


def _match(me: str, data: NkiTensor, vals: NkiTensor, columns: Any) -> Array:
    """First free position of each value, in the order of `columns`; -1 = not there. [P, 8]"""
    x = fp32(data, me, "data").reshape(data.v.layout.partitions, -1)
    wanted = fp32(vals, me, "vals").reshape(x.shape[0], WIDTH8)
    taken = np.zeros(x.shape, np.bool_)
    found = np.full(wanted.shape, -1, np.int64)
    every = np.arange(len(x))
    for column in columns:
        hits = (x == wanted[:, column, None]) & ~taken
        first = hits.argmax(axis=1)
        there = hits[every, first]
        found[there, column] = first[there]
        taken[every[there], first[there]] = True
    return found


def _searched(me: str, operand: str, t: Any) -> Layout:
    layout = check_tile(me, operand, t)
    if not WIDTH8 <= layout.free <= MAX8_FREE:
        raise NkiValidationError(
            f"{me}: operand {operand} has {layout.free} elements per partition; allowed: "
            f"{WIDTH8}..{MAX8_FREE}"
        )
    if layout.ndim > 3:
        raise NkiValidationError(f"{me}: operand {operand} has {layout.ndim} dimensions; limit 3")
    return layout


def _check_width(me: str, operand: str, layout: Layout, source: Layout, width: int) -> None:
    if layout.partitions != source.partitions or layout.free != width:
        raise NkiValidationError(
            f"{me}: operand {operand} has shape {layout.shape}; needed "
            f"[{source.partitions}, {width}]"
        )
