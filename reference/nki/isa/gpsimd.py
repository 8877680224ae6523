"""Searches and cross-partition reductions on GpSimd."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..dtypes import INTEGERS, Array
from ..errors import NkiValidationError
from ..ops import NAMES
from ..registers import integer
from ..tensor import NkiTensor
from .enums import NkiInstruction
from .exactness import check_exact_sums
from .execute import finish, fp32, put, raw
from .gaps import nothing_to_move
from .gathers import PARTITIONS_PER_CORE
from .operands import SBUF_ONLY, check_destination, check_tile

_COUNTED: Final = frozenset({"float32", "int32"})


def tensor_partition_reduce(
    dst: NkiTensor, op: Any, data: NkiTensor, name: str | None = None
) -> NkiInstruction:
    """dst[1, F] = reduction of data[P, F] over the partitions."""
    me = "nisa.tensor_partition_reduce"
    out = check_tile(me, "dst", dst, regions=SBUF_ONLY)
    source = check_tile(me, "data", data, regions=SBUF_ONLY)
    check_destination(me, dst)
    if out.partitions != 1 or out.free != source.free:
        raise NkiValidationError(
            f"{me}: dst has shape {out.shape}; needed 1 partition x {source.free} elements"
        )
    reduce = _PARTITION_REDUCES.get(NAMES.get(op, ""))
    if reduce is None:
        raise NkiValidationError(
            f"{me}: op {getattr(op, '__name__', op)!r}; allowed: nl. "
            f"{', '.join(sorted(_PARTITION_REDUCES))}"
        )
    bitwise = NAMES[op].startswith("bitwise")
    if bitwise and not {out.dtype, source.dtype} <= INTEGERS:
        raise NkiValidationError(f"{me}: op nl.{NAMES[op]} takes integer dtypes")
    x = raw(data, me, "data") if bitwise else fp32(data, me, "data")
    if not bitwise:
        check_exact_sums(x.reshape(source.partitions, -1).T, source.dtype, out.dtype, NAMES[op], me)
    put(dst, np.asarray(reduce(x, axis=0)).reshape(out.shape), me)
    return finish("gpsimd", "tensor_partition_reduce", (dst,), (data,), NAMES[op])


_PARTITION_REDUCES: Final[dict[str, Any]] = {
    "add": np.add.reduce,
    "average": np.mean,
    "maximum": np.maximum.reduce,
    "bitwise_or": np.bitwise_or.reduce,
    "bitwise_and": np.bitwise_and.reduce,
}


def sequence_bounds(
    dst: NkiTensor, segment_ids: NkiTensor, name: str | None = None
) -> NkiInstruction:
    """dst[1, 2, n]: first index and one past the last index of each element's run of equal ids;
    (n, -1) for id 0.
    """
    me = "nisa.sequence_bounds"
    out = check_tile(me, "dst", dst, regions=SBUF_ONLY, dtypes=_COUNTED)
    ids = check_tile(me, "segment_ids", segment_ids, regions=SBUF_ONLY, dtypes=_COUNTED)
    check_destination(me, dst)
    if ids.partitions != 1 or out.shape != (1, 2, ids.free) or out.dtype != ids.dtype:
        raise NkiValidationError(
            f"{me}: segment_ids {ids.shape} {ids.dtype}, dst {out.shape} {out.dtype}; needed "
            "[1, n] and [1, 2, n] of one dtype"
        )
    values = raw(segment_ids, me, "segment_ids").reshape(-1)
    if (values < 0).any():
        raise NkiValidationError(f"{me}: segment id {values.min()}; allowed: >= 0")
    num = len(values)
    edges = np.flatnonzero(np.diff(values)) + 1
    starts, ends = np.r_[0, edges], np.r_[edges, num]
    run = np.searchsorted(starts, np.arange(num), side="right") - 1
    bounds = np.stack([starts[run], ends[run]])
    bounds[:, values == 0] = [[num], [-1]]
    put(dst, bounds.reshape(out.shape).astype(np.float32), me)
    return finish("gpsimd", "sequence_bounds", (dst,), (segment_ids,))


def nonzero_with_count(
    dst: NkiTensor,
    src: NkiTensor,
    index_offset: int = 0,
    padding_val: int = -1,
    name: str | None = None,
) -> NkiInstruction:
    """In partitions 0, 16, ..: indices of nonzero elements + index_offset, padding, and last
    their count.
    """
    me = "nisa.nonzero_with_count"
    out = check_tile(me, "dst", dst, regions=SBUF_ONLY, dtypes=frozenset({"int32"}))
    source = check_tile(me, "src", src, regions=SBUF_ONLY, dtypes=_COUNTED)
    check_destination(me, dst)
    if out.partitions != source.partitions or out.free != source.free + 1:
        raise NkiValidationError(
            f"{me}: dst has shape {out.shape}; needed {source.partitions} partitions x "
            f"{source.free + 1} elements"
        )
    for p in range(0, source.partitions, PARTITIONS_PER_CORE):
        if nothing_to_move(dst[p : p + 1], src[p : p + 1]):
            continue  # it takes all of 0, 16, .., whether or not the kernel uses them
        x = raw(src[p : p + 1], me, "src").reshape(-1)
        found = np.flatnonzero(x)
        row = np.full(out.free, integer(f"{me}: padding_val", padding_val), np.int32)
        row[: len(found)] = found + integer(f"{me}: index_offset", index_offset)
        row[-1] = len(found)
        put(dst[p : p + 1], row.reshape((1, *out.shape[1:])), me)
    return finish("gpsimd", "nonzero_with_count", (dst,), (src,))


def topk(
    val_dst: NkiTensor,
    idx_dst: NkiTensor,
    src: NkiTensor,
    n: int,
    name: str | None = None,
) -> NkiInstruction:
    """The K largest of n bf16 values, ascending, and their indices.

    The values of 16 partitions form one list (element i lies in partition i % 16, column i // 16);
    all 16 partitions of the results hold that list's answer. Equal values keep the lower index.
    """
    me = "nisa.topk"
    source = check_tile(me, "src", src, regions=SBUF_ONLY, dtypes=frozenset({"bfloat16"}))
    values = check_tile(me, "val_dst", val_dst, regions=SBUF_ONLY, dtypes=frozenset({"bfloat16"}))
    index = check_tile(me, "idx_dst", idx_dst, regions=SBUF_ONLY, dtypes=frozenset({"uint32"}))
    check_destination(me, val_dst)
    check_destination(me, idx_dst)
    k = values.free
    if not 8 <= n < 65536:
        raise NkiValidationError(f"{me}: n {n}; allowed: 8..65535")
    if not 1 <= k < 32768 or k > n:
        raise NkiValidationError(f"{me}: K {k} from val_dst; allowed: 1..{min(n, 32767)}")
    if source.partitions % PARTITIONS_PER_CORE or source.free < -(-n // PARTITIONS_PER_CORE):
        raise NkiValidationError(
            f"{me}: src has shape {source.shape}; needed a multiple of {PARTITIONS_PER_CORE} "
            f"partitions and at least {-(-n // PARTITIONS_PER_CORE)} elements per partition"
        )
    if not values.partitions == index.partitions == source.partitions or index.free != k:
        raise NkiValidationError(
            f"{me}: val_dst {values.shape}, idx_dst {index.shape}; both must be "
            f"[{source.partitions}, K]"
        )
    columns = -(-n // PARTITIONS_PER_CORE)
    best = np.empty((source.partitions, k), np.float32)
    at = np.empty((source.partitions, k), np.uint32)
    for start in range(0, source.partitions, PARTITIONS_PER_CORE):
        rows = slice(start, start + PARTITIONS_PER_CORE)
        snake = _snake(me, src[rows], columns)[:n]
        order = np.argsort(-snake, kind="stable")[:k][::-1]
        best[rows], at[rows] = snake[order], order
    put(val_dst, best.reshape(values.shape), me)
    put(idx_dst, at.reshape(index.shape), me)
    return finish("gpsimd", "topk", (val_dst, idx_dst), (src,))


def _snake(me: str, rows: NkiTensor, columns: int) -> Array:
    return fp32(rows[:, :columns], me, "src").T.reshape(-1)
