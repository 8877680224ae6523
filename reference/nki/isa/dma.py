"""DMA: dma_copy with gather, scatter and run-time offsets, and dma_transpose."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .. import trace
from ..access_pattern import out_of_bounds, resolve, scalar_index
from ..core import current
from ..dtypes import Array
from ..errors import NkiValidationError, kernel_line
from ..regions import HBM, PSUM, SBUF, SHARED_HBM
from ..rules.dma_shapes import check_copied_shapes, is_plain_copy
from ..rules.loop_dma import check_loop_dma
from ..rules.scatter import check_hbm_scatter, check_skipped_rows
from ..tensor import NkiTensor
from ..view import View
from .dma_rows import gather_rows, scatter, store_rows, through_fp32
from .elementwise import signature
from .enums import NkiInstruction, as_dge_mode, dge_mode, engine, oob_mode
from .execute import account, handed_over, index_accesses, target
from .gaps import moved_gaps
from .operands import check_destination
from .overlap import check_overlap

_REGIONS: Final = HBM | {SBUF}
_plans: dict[object, bool] = {}


def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: oob_mode = oob_mode.error,
    dge_mode: dge_mode = dge_mode.unknown,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """Move elements between HBM and SBUF in row-major order; run-time rows or offsets by `.ap`.

    Different dtypes cast through fp32. With oob_mode.skip, a row out of bounds is not moved.
    """
    me = "nisa.dma_copy"
    dge_mode = as_dge_mode(me, dge_mode)
    key = (signature(dst), signature(src), priority, oob_mode, dge_mode, engine)
    plain = _plans.get(key)
    if plain is None:
        _check_copy(me, dst, src, priority, oob_mode, dge_mode, engine)
        plain = _plans[key] = is_plain_copy(dst, src)
    if not plain:
        check_copied_shapes(me, dst, src)
    if not src.v.known and dst.buffer is not SHARED_HBM and _plain(src) and _plain(dst):
        gaps = moved_gaps(me, dst, src, _as_it_is)
        if gaps is not None:
            with gaps:
                return dma_copy(dst, src, priority, oob_mode, dge_mode, engine)
    skip = oob_mode is _SKIP
    skipped = 0
    region = current().region
    if region is not None and (skip or dge_mode is _NONE):
        check_loop_dma(me, region, dst, static=dge_mode is _NONE, skips=skip)
    if src.dynamic is None and dst.dynamic is None:
        store(me, dst, load(me, src))
    else:
        if dge_mode is not _UNKNOWN:
            _check_dynamic_mode(me, dst, src, dge_mode)
        skipped = _dynamic_copy(me, dst, src, skip)
    return record_dma("dma_copy", (dst,), (src,), dge_mode, engine, skipped_rows=skipped)


def _plain(t: NkiTensor) -> bool:
    return t.dynamic is None


def _as_it_is(values: Array) -> Array:
    return values


_SKIP: Final = oob_mode.skip
_UNKNOWN: Final = dge_mode.unknown
_SWDGE: Final = dge_mode.swdge
_NONE: Final = dge_mode.none


def _check_copy(
    me: str, dst: Any, src: Any, priority: Any, oob: Any, dge: Any, trigger: Any
) -> None:
    check_dma_operand(me, "dst", dst)
    check_dma_operand(me, "src", src)
    check_destination(me, dst)
    if dst.size != src.size:
        raise NkiValidationError(
            f"{me}: dst has shape {dst.shape} ({dst.size} elements), src {src.shape} "
            f"({src.size}); the element counts must agree"
        )
    if dst.dtype != src.dtype and "int64" in (dst.dtype, src.dtype):
        raise NkiValidationError(
            f"{me}: a cast of {src.dtype} to {dst.dtype}; a DMA moves int64 as it is, "
            ".view(nl.int32) has its halves"
        )
    check_dma_options(me, priority, oob, dge)
    if dge is dge_mode.hwdge and dst.dtype != src.dtype:
        raise NkiValidationError(
            f"{me}: hwdge cannot cast {src.dtype} to {dst.dtype}; use .view(dtype) or another "
            "dge_mode"
        )
    if trigger is not engine.unknown and not (
        trigger in (engine.sync, engine.scalar) and dge is dge_mode.hwdge
    ):
        raise NkiValidationError(
            f"{me}: engine {trigger} with {dge}; allowed: sync or scalar, with dge_mode.hwdge only"
        )


def check_dma_operand(me: str, operand: str, t: Any) -> None:
    """DMA reaches HBM and SBUF."""
    if not isinstance(t, NkiTensor):
        raise NkiValidationError(
            f"{me}: operand {operand} is a {type(t).__name__}; allowed: an NkiTensor"
        )
    if t.buffer not in _REGIONS:
        hint = "evict it with nisa.tensor_copy first" if t.buffer is PSUM else ""
        raise NkiValidationError(
            f"{me}: operand {operand} {t.name!r} is in {t.buffer.value}; allowed: HBM, SBUF; {hint}"
        )
    if t.v.layout.on_chip and t.v.layout.partitions > 128:
        raise NkiValidationError(
            f"{me}: operand {operand} has {t.v.layout.partitions} partitions; limit 128"
        )


def check_dma_options(me: str, priority: Any, oob: Any, dge: Any) -> None:
    """Enum arguments, and what exists on trn3 only."""
    if priority is not None:
        raise NkiValidationError(f"{me}: priority {priority} exists on trn3 only; leave it None")
    if not isinstance(oob, oob_mode):
        raise NkiValidationError(f"{me}: oob_mode {oob!r}; allowed: error, skip")
    if not isinstance(dge, dge_mode):
        raise NkiValidationError(f"{me}: dge_mode {dge!r}; allowed: unknown, swdge, hwdge, none")


def _check_dynamic_mode(me: str, dst: NkiTensor, src: NkiTensor, dge: dge_mode) -> None:
    """Gather and scatter need swdge; descriptors made by the host are static."""
    for operand, t in (("dst", dst), ("src", src)):
        if t.dynamic is None:
            continue
        if t.dynamic.vector and dge is not dge_mode.swdge:
            raise NkiValidationError(
                f"{me}: operand {operand} has a vector_offset with {dge}; allowed: unknown, swdge"
            )
        if dge is dge_mode.none:
            raise NkiValidationError(
                f"{me}: operand {operand} has a run-time offset with dge_mode.none, whose "
                "descriptors are static; allowed: unknown, swdge, hwdge"
            )


def load(me: str, t: NkiTensor, view: View | None = None) -> Array:
    view = t.v if view is None else view
    storage = t.storage
    if storage.watch is not None:
        storage.watch.before_read(storage, view, me, "src")
    if not view.known:
        storage.check_written(view, me, "src")
    return view.array


def store(me: str, dst: NkiTensor, values: Array) -> None:
    view = target(dst, me)
    if values.dtype != view.array.dtype or dst.dtype == "tfloat32":
        values = through_fp32(me, values, dst.dtype)
    shape = view.layout.shape
    np.copyto(view.array, values if values.shape == shape else values.reshape(shape))


def _dynamic_copy(me: str, dst: NkiTensor, src: NkiTensor, skip: bool) -> int:
    """Copy with a run-time address on either side; the number of rows left out."""
    source = dst_view = None
    for operand, t in (("src", src), ("dst", dst)):
        if t.dynamic is not None and not t.dynamic.vector:
            view = resolve(t, me)
            if view is None:
                if skip:
                    check_skipped_rows(me, operand, t.name, scalar_index(t, me))
                    return dst.shape[0]
                raise out_of_bounds(t, me, operand)
            if t is src:
                source = view
            else:
                dst_view = view
    gathers = src.dynamic is not None and src.dynamic.vector
    scatters = dst.dynamic is not None and dst.dynamic.vector
    valid: Array | None = None
    if gathers:
        values, valid = gather_rows(me, src, skip)
    else:
        values = load(me, src, source)
    if scatters:
        check_hbm_scatter(me, dst, src)
        return scatter(me, dst, values, skip)
    if valid is not None and not valid.all():
        store_rows(me, dst, values, valid)
        return int((~valid).sum())
    if dst_view is None:
        store(me, dst, values)
    else:
        _store_at(me, dst, dst_view, values)
    return 0


def _store_at(me: str, dst: NkiTensor, view: View, values: Array) -> None:
    storage = dst.storage
    if storage.watch is not None:
        storage.watch.before_write(storage, view, me)
    storage.note_write(view)
    storage.version += 1
    values = through_fp32(me, values, dst.dtype) if values.dtype != view.array.dtype else values
    np.copyto(view.array, values.reshape(view.layout.shape))


def record_dma(
    opcode: str,
    writes: tuple[NkiTensor, ...],
    reads: tuple[NkiTensor, ...],
    dge: dge_mode = _UNKNOWN,
    trigger: engine = engine.unknown,
    *,
    transpose: bool = False,
    skipped_rows: int = 0,
) -> NkiInstruction:
    """Count and record a DMA instruction."""
    dst = writes[0]
    for src in reads:
        same = src.v is dst.v and src.dynamic is dst.dynamic and not transpose
        if src.storage is dst.storage and not same:
            check_overlap(opcode, dst, src)
    if dst.buffer in HBM and (opcode, dge) != ("dma_compute", _SWDGE):
        dst.storage.copied_at = kernel_line()[1]
    number = account(writes, reads)
    recorder = trace.active
    if recorder is not None:
        recorder.dma(
            opcode,
            current().index,
            tuple([t.access for t in writes]),
            (*[t.access for t in reads], *index_accesses(writes, reads)),
            "" if trigger is engine.unknown else trigger.name,
            dge.name,
            transpose,
            skipped_rows,
        )
    return handed_over(number)
