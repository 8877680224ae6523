"""DMA: dma_copy with gather, scatter and run-time offsets, and dma_transpose."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .. import trace
from ..access_pattern import out_of_bounds, resolve, row_indices
from ..core import current
from ..dtypes import Array, cast_through_fp32
from ..errors import NkiValidationError, OutOfBoundsError, at_kernel_line
from ..regions import HBM, PSUM, SBUF
from ..storage import View
from ..strict import violation
from ..tensor import NkiTensor
from .enums import NkiInstruction, dge_mode, engine, oob_mode
from .execute import account, handed_over, target
from .operands import check_destination
from .vector import signature

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
    key = (signature(dst), signature(src), priority, oob_mode, dge_mode, engine)
    if key not in _plans:
        _check_copy(me, dst, src, priority, oob_mode, dge_mode, engine)
        _plans[key] = True
    skip = oob_mode is _SKIP
    skipped = 0
    if src.dynamic is None and dst.dynamic is None:
        _store(me, dst, _load(me, src))
    else:
        if dge_mode is not _UNKNOWN:
            _check_dynamic_mode(me, dst, src, dge_mode)
        skipped = _dynamic_copy(me, dst, src, skip)
    return record_dma("dma_copy", (dst,), (src,), dge_mode, engine, skipped_rows=skipped)


_SKIP: Final = oob_mode.skip
_UNKNOWN: Final = dge_mode.unknown


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


def _load(me: str, t: NkiTensor, view: View | None = None) -> Array:
    view = t.v if view is None else view
    storage = t.storage
    if storage.watch is not None:
        storage.watch.before_read(storage, view, me, "src")
    if not view.known:
        storage.check_written(view, me, "src")
    return view.array


def _store(me: str, dst: NkiTensor, values: Array) -> None:
    view = target(dst, me)
    if values.dtype != view.array.dtype or dst.dtype == "tfloat32":
        values = cast_through_fp32(values, dst.dtype)
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
                    return 1
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
        values = _load(me, src, source)
    if scatters:
        return _scatter(me, dst, values, skip)
    if valid is not None and not valid.all():
        _store_rows(me, dst, values, valid)
        return int((~valid).sum())
    if dst_view is None:
        _store(me, dst, values)
    else:
        _store_at(me, dst, dst_view, values)
    return 0


def _store_at(me: str, dst: NkiTensor, view: View, values: Array) -> None:
    storage = dst.storage
    if storage.watch is not None:
        storage.watch.before_write(storage, view, me)
    storage.note_write(view)
    storage.version += 1
    values = cast_through_fp32(values, dst.dtype) if values.dtype != view.array.dtype else values
    np.copyto(view.array, values.reshape(view.layout.shape))


def indexed_rows(t: NkiTensor, operand: str, me: str, skip: bool) -> tuple[Array, Array]:
    """(indices, in bounds) of the rows of a vector_offset view."""
    indices, valid = row_indices(t, me)
    if not skip and not valid.all():
        bad = int(indices[~valid][0])
        raise OutOfBoundsError(
            f"{me}: operand {operand} {t.name!r}: row index {bad} (row "
            f"{int(np.flatnonzero(~valid)[0])} of {len(indices)}) is outside the tensor; pass "
            f"oob_mode=nisa.oob_mode.skip to leave such rows out{at_kernel_line()}"
        )
    return indices, valid


def row_table(t: NkiTensor, num_rows: int) -> View:
    """All rows that a vector_offset may choose, as one view [num_rows, ...]."""
    assert t.dynamic is not None
    layout = t.v.layout
    return t.storage.view(
        layout.dtype,
        (num_rows,) + layout.shape[1:],
        (t.dynamic.step,) + layout.strides[1:],
        t.v.offset,
    )


def gather_rows(me: str, src: NkiTensor, skip: bool) -> tuple[Array, Array]:
    """(rows, in bounds); rows out of bounds hold arbitrary values."""
    indices, valid = indexed_rows(src, "src", me, skip)
    chosen = np.where(valid, indices, 0)
    table = row_table(src, int(chosen.max()) + 1)
    storage = src.storage
    if storage.watch is not None:
        storage.watch.before_read(storage, table, me, "src")
    if not storage.written and not table.known:
        for row in np.unique(chosen[valid]):
            one = storage.view(
                src.dtype,
                (1,) + src.shape[1:],
                (0,) + src.strides[1:],
                src.v.offset + int(row) * _step(src),
            )
            if not one.known:
                storage.check_written(one, me, "src")
    return table.array[chosen], valid


def _step(t: NkiTensor) -> int:
    assert t.dynamic is not None
    return t.dynamic.step


def _store_rows(me: str, dst: NkiTensor, values: Array, valid: Array) -> None:
    """Write only the rows of dst whose source row was in bounds."""
    layout = dst.v.layout
    if layout.shape[0] != len(valid):
        raise NkiValidationError(
            f"{me}: dst has {layout.shape[0]} rows for {len(valid)} gathered rows; with "
            "oob_mode.skip they must agree"
        )
    values = values.reshape((len(valid), *layout.shape[1:]))
    if values.dtype != layout.np_dtype:
        values = cast_through_fp32(values, layout.dtype)
    storage = dst.storage
    if storage.watch is not None:
        storage.watch.before_write(storage, dst.v, me)
    if not storage.written:
        storage.mask_of(dst.v)[valid] = 0
    storage.version += 1
    dst.v.array[valid] = values[valid]


def _store_transposed_rows(me: str, dst: NkiTensor, values: Array, valid: Array) -> None:
    """Write only the columns (last dimension) of dst whose source row was in bounds."""
    storage = dst.storage
    if storage.watch is not None:
        storage.watch.before_write(storage, dst.v, me)
    if not storage.written:
        storage.mask_of(dst.v)[..., valid] = 0
    storage.version += 1
    dst.v.array[..., valid] = values[..., valid]


def _scatter(me: str, dst: NkiTensor, values: Array, skip: bool) -> int:
    indices, valid = indexed_rows(dst, "dst", me, skip)
    layout = dst.v.layout
    values = values.reshape(layout.shape)
    if values.dtype != layout.np_dtype:
        values = cast_through_fp32(values, layout.dtype)
    chosen = indices[valid]
    if len(np.unique(chosen)) != len(chosen):
        rows, counts = np.unique(chosen, return_counts=True)
        violation(
            "scatter_duplicate",
            f"{me}: row {int(rows[counts > 1][0])} of dst {dst.name!r} is written more than once "
            "by one DMA; the order of the writes is undefined",
        )
    if len(chosen):
        table = row_table(dst, int(chosen.max()) + 1)
        storage = dst.storage
        if storage.watch is not None:
            storage.watch.before_write(storage, table, me)
        if not storage.written:
            storage.mask_of(table)[chosen] = 0
        storage.version += 1
        table.array[chosen] = values[valid]
    return int((~valid).sum())


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
    for t in (*writes, *reads):
        if t.dynamic is not None and isinstance(t.dynamic.index, NkiTensor):
            reads = (*reads, t.dynamic.index)
    number = account(writes, reads)
    recorder = trace.active
    if recorder is not None:
        recorder.dma(
            opcode,
            current().index,
            tuple([t.access for t in writes]),
            tuple([t.access for t in reads]),
            "" if trigger is engine.unknown else trigger.name,
            dge.name,
            transpose,
            skipped_rows,
        )
    return handed_over(number)
