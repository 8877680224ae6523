"""dma_compute: elementwise sums inside the DMA engines, with gather and scatter updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ..core import current
from ..dtypes import INTEGERS, WIDE_INTEGERS, Array
from ..errors import NkiValidationError
from ..ops import NAMES
from ..regions import SBUF
from ..rules.dma_shapes import check_copied_shapes
from ..rules.loop_dma import check_loop_dma
from ..rules.scatter import check_scatter_add
from ..tensor import NkiTensor
from .dma import check_dma_operand, check_dma_options, load, record_dma, store
from .dma_rows import gather_rows, scatter, store_rows
from .enums import NkiInstruction, dge_mode, oob_mode
from .exactness import check_exact, check_exact_result
from .operands import check_destination

MAX_SOURCES: Final = 16
_SKIP: Final = oob_mode.skip


def dma_compute(
    dst: NkiTensor,
    srcs: list[NkiTensor],
    reduce_op: Any,
    scales: Sequence[float] | None = None,
    unique_indices: bool = True,
    oob_mode: oob_mode = oob_mode.error,
    name: str | None = None,
) -> NkiInstruction:
    """Store dst = float32 sum of the sources; with a vector_offset, update gathered rows."""
    me = "nisa.dma_compute"
    indirect = _check(me, dst, srcs, reduce_op, scales, unique_indices, oob_mode)
    core = current()
    skip = oob_mode is _SKIP
    if core.region is not None and (skip or not indirect):
        check_loop_dma(me, core.region, dst, static=not indirect, skips=skip)
    if not indirect:
        for src in srcs:
            check_copied_shapes(me, dst, src)
        terms = [_wide(me, load(me, src)).reshape(-1) for src in srcs]
        total = np.zeros(dst.size, np.float32)
        for term in terms:
            total += term
        if {src.dtype for src in srcs} <= INTEGERS:
            check_exact_result(total, dst.dtype, me, lambda: np.sum(terms, axis=0, dtype=float))
        store(me, dst, total.reshape(dst.shape))
        return record_dma("dma_compute", (dst,), tuple(srcs), dge_mode.none)
    rows = next(s for s in srcs if s.is_indirect())
    other = next(s for s in srcs if s is not rows)
    gathered, valid = gather_rows(me, rows, skip)
    pair: list[Array] = [_wide(me, gathered), _wide(me, load(me, other)).reshape(gathered.shape)]
    total = pair[0] + pair[1]
    if {rows.dtype, other.dtype} <= INTEGERS:
        check_exact_result(total, dst.dtype, me, lambda: np.sum(pair, axis=0, dtype=float))
    if dst.is_indirect():
        check_scatter_add(me, core, dst.storage, int((~valid).sum()))
        scatter(me, dst, total, skip)
    else:
        store_rows(me, dst, total, valid)
    return record_dma(
        "dma_compute", (dst,), tuple(srcs), dge_mode.swdge, skipped_rows=int((~valid).sum())
    )


def _wide(me: str, values: Array) -> Array:
    shadow = values.astype(np.float32)
    if values.dtype.name in WIDE_INTEGERS:
        check_exact(values, shadow, me, "srcs")
    return shadow


def _check(
    me: str,
    dst: Any,
    srcs: Any,
    reduce_op: Any,
    scales: Any,
    unique_indices: Any,
    oob: Any,
) -> bool:
    """Validate; whether a vector_offset is involved."""
    check_dma_operand(me, "dst", dst)
    check_destination(me, dst)
    check_dma_options(me, None, oob, dge_mode.unknown)
    if not 1 <= len(srcs) <= MAX_SOURCES:
        raise NkiValidationError(f"{me}: {len(srcs)} sources; allowed: 1..{MAX_SOURCES}")
    for i, src in enumerate(srcs):
        check_dma_operand(me, f"srcs[{i}]", src)
        if src.size != dst.size:
            raise NkiValidationError(
                f"{me}: srcs[{i}] has {src.size} elements, dst {dst.size}; they must agree"
            )
    if NAMES.get(reduce_op) != "add":
        raise NkiValidationError(
            f"{me}: reduce_op {getattr(reduce_op, '__name__', reduce_op)!r}; allowed: nl.add"
        )
    if scales is not None and (len(scales) != len(srcs) or any(s != 1.0 for s in scales)):
        raise NkiValidationError(
            f"{me}: scales {scales}; allowed: None or one 1.0 for each of {len(srcs)} sources"
        )
    for t in (dst, *srcs):
        if t.dynamic is not None and not t.dynamic.vector:
            raise NkiValidationError(f"{me}: a scalar_offset; addresses are static or vector")
    indirect = [s for s in srcs if s.is_indirect()]
    if not indirect and not dst.is_indirect():
        if oob is _SKIP:
            raise NkiValidationError(f"{me}: oob_mode.skip goes with a vector_offset only")
        return False
    if len(srcs) != 2 or len(indirect) != 1 or not unique_indices:
        raise NkiValidationError(
            f"{me}: with a vector_offset there must be 2 sources, one of them indirect, and "
            f"unique_indices=True; got {len(srcs)} sources, {len(indirect)} indirect"
        )
    other = next(s for s in srcs if s is not indirect[0])
    same = indirect[0] if dst.is_indirect() else other
    if same.storage is not dst.storage or same.v is not dst.v:
        raise NkiValidationError(
            f"{me}: a read-modify-write updates dst: one source must be the same view as dst"
        )
    if other.buffer is not SBUF:
        raise NkiValidationError(
            f"{me}: a read-modify-write goes between indexed rows in HBM and a tile in SBUF; "
            f"{other.name!r} is in {other.buffer.value}: load it first"
        )
    return True
