"""Rows chosen at run time: the gather and scatter side of the DMA instructions."""

from __future__ import annotations

import numpy as np

from ..access_pattern import row_indices
from ..dtypes import WIDE_INTEGERS, Array, cast
from ..errors import NkiValidationError, OutOfBoundsError, at_kernel_line
from ..rules.indirect_rows import check_indirect_operand
from ..rules.scatter import check_skipped_rows
from ..strict import violation
from ..tensor import NkiTensor
from ..view import View
from .exactness import check_exact


def through_fp32(me: str, values: Array, dtype: str) -> Array:
    """The two-step cast of a DMA between different dtypes: source -> fp32 -> `dtype`."""
    if values.dtype == np.float32:
        return cast(values, dtype)
    shadow = values.astype(np.float32)
    if values.dtype.name in WIDE_INTEGERS:
        check_exact(values, shadow, me, "src")
    return cast(shadow, dtype)


def indexed_rows(t: NkiTensor, operand: str, me: str, skip: bool) -> tuple[Array, Array]:
    """(indices, in bounds) of the rows of a vector_offset view."""
    check_indirect_operand(me, operand, t)
    indices, valid = row_indices(t, me)
    if not skip and not valid.all():
        bad = int(indices[~valid][0])
        raise OutOfBoundsError(
            f"{me}: operand {operand} {t.name!r}: row index {bad} (row "
            f"{int(np.flatnonzero(~valid)[0])} of {len(indices)}) is outside the tensor; pass "
            f"oob_mode=nisa.oob_mode.skip to leave such rows out{at_kernel_line()}"
        )
    if not valid.all():
        check_skipped_rows(me, operand, t.name, indices)
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
        storage.watch.before_read(storage, table, me, "src", np.unique(chosen[valid]))
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


def store_rows(me: str, dst: NkiTensor, values: Array, valid: Array) -> None:
    """Write only the rows of dst whose source row was in bounds."""
    layout = dst.v.layout
    if layout.shape[0] != len(valid):
        raise NkiValidationError(
            f"{me}: dst has {layout.shape[0]} rows for {len(valid)} gathered rows; with "
            "oob_mode.skip they must agree"
        )
    values = values.reshape((len(valid), *layout.shape[1:]))
    if values.dtype != layout.np_dtype:
        values = through_fp32(me, values, layout.dtype)
    storage = dst.storage
    if storage.watch is not None:
        storage.watch.before_write(storage, dst.v, me, np.flatnonzero(valid))
    if not storage.written:
        storage.writes.mark(storage, dst.v, valid)
    storage.version += 1
    dst.v.array[valid] = values[valid]


def store_transposed_rows(me: str, dst: NkiTensor, values: Array, valid: Array) -> None:
    """Write only the columns (last dimension) of dst whose source row was in bounds."""
    storage = dst.storage
    if storage.watch is not None:
        storage.watch.before_write(storage, dst.v, me)
    if not storage.written:
        storage.writes.mark(storage, dst.v, (..., valid))
    storage.version += 1
    dst.v.array[..., valid] = values[..., valid]


def scatter(me: str, dst: NkiTensor, values: Array, skip: bool) -> int:
    indices, valid = indexed_rows(dst, "dst", me, skip)
    layout = dst.v.layout
    values = values.reshape(layout.shape)
    if values.dtype != layout.np_dtype:
        values = through_fp32(me, values, layout.dtype)
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
            storage.watch.before_write(storage, table, me, np.unique(chosen))
        if not storage.written:
            storage.writes.mark(storage, table, chosen)
        storage.version += 1
        table.array[chosen] = values[valid]
    return int((~valid).sum())
