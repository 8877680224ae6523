"""Gathers inside SBUF on GpSimd, and cross-partition shuffles on the Vector Engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ..dtypes import Array
from ..errors import NkiValidationError
from ..layout import Layout
from ..tensor import NkiTensor
from .enums import NkiInstruction
from .execute import finish, put, raw, target
from .gaps import moved_gaps
from .operands import SBUF_ONLY, allowed_starts, check_destination, check_tile

PARTITIONS_PER_CORE: Final = 16
"""SBUF partitions that one of the eight GpSimd cores reaches."""
MAX_INDICES_PER_CORE: Final = 4096
QUADRANT: Final = 32
KEEP: Final = 255
"""Shuffle mask entry that leaves a partition of dst as it is."""


def local_gather(
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Per 16 partitions: read num_elem_per_idx elements at each index of the slice of `index`,
    flattened partition first, in every partition of the same slice of src_buffer.
    """
    me = "nisa.local_gather"
    out, source, rows = _check_local(me, dst, src_buffer, index, num_elem_per_idx)
    per_core = rows.free * PARTITIONS_PER_CORE
    num = per_core if num_valid_indices is None else int(num_valid_indices)
    if not 1 <= num <= per_core or num > MAX_INDICES_PER_CORE:
        raise NkiValidationError(
            f"{me}: {num} indices per core; allowed: 1..{min(per_core, MAX_INDICES_PER_CORE)}"
        )
    if out.free != num * num_elem_per_idx:
        raise NkiValidationError(
            f"{me}: dst has {out.free} elements per partition; needed {num} indices x "
            f"{num_elem_per_idx} elements"
        )
    indices = raw(index, me, "index").reshape(rows.partitions, -1).astype(np.int64)
    columns = []
    for start in range(0, source.partitions, PARTITIONS_PER_CORE):
        core = indices[start : start + PARTITIONS_PER_CORE]
        flat = core.T.reshape(-1)[:num, None] + np.arange(num_elem_per_idx)
        if flat.max() >= source.free:
            raise NkiValidationError(
                f"{me}: index {int(flat.max())} in partitions {start}.."
                f"{start + PARTITIONS_PER_CORE - 1}; src_buffer has {source.free} elements per "
                "partition (out of bounds is undefined)"
            )
        columns.append(flat.reshape(-1))
    every = np.repeat(np.stack(columns), PARTITIONS_PER_CORE, axis=0)
    _gather(me, dst, src_buffer, "src_buffer", every)
    return finish("gpsimd", "local_gather", (dst,), (src_buffer, index))


def _check_local(
    me: str, dst: Any, src: Any, index: Any, num_elem_per_idx: int
) -> tuple[Layout, Layout, Layout]:
    out = check_tile(me, "dst", dst, regions=SBUF_ONLY)
    source = check_tile(me, "src_buffer", src, regions=SBUF_ONLY)
    rows = check_tile(me, "index", index, regions=SBUF_ONLY, dtypes=frozenset({"uint16"}))
    check_destination(me, dst)
    if out.dtype != source.dtype:
        raise NkiValidationError(f"{me}: dst has dtype {out.dtype}, src_buffer {source.dtype}")
    if source.partitions != rows.partitions or source.partitions % PARTITIONS_PER_CORE:
        raise NkiValidationError(
            f"{me}: src_buffer has {source.partitions} partitions, index {rows.partitions}; they "
            f"must agree and be a multiple of {PARTITIONS_PER_CORE}"
        )
    if out.partitions != source.partitions:
        raise NkiValidationError(
            f"{me}: dst has {out.partitions} partitions, src_buffer {source.partitions}"
        )
    if num_elem_per_idx not in (1, 2, 4, 8, 16, 32):
        raise NkiValidationError(
            f"{me}: num_elem_per_idx {num_elem_per_idx}; allowed: 1, 2, 4, 8, 16, 32"
        )
    return out, source, rows


def nc_n_gather(
    dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None
) -> NkiInstruction:
    """dst[p, i] = data[p, indices[p, i]] over the flattened free dimensions."""
    me = "nisa.nc_n_gather"
    out = check_tile(me, "dst", dst, regions=SBUF_ONLY)
    source = check_tile(me, "data", data, regions=SBUF_ONLY)
    rows = check_tile(me, "indices", indices, regions=SBUF_ONLY, dtypes=frozenset({"uint32"}))
    check_destination(me, dst)
    if out.dtype != source.dtype:
        raise NkiValidationError(f"{me}: dst has dtype {out.dtype}, data {source.dtype}")
    if not out.partitions == source.partitions == rows.partitions or out.free != rows.free:
        raise NkiValidationError(
            f"{me}: dst {out.shape}, data {source.shape}, indices {rows.shape}: partitions must "
            "agree, and the elements per partition of dst and indices"
        )
    flat = raw(indices, me, "indices").reshape(rows.partitions, -1).astype(np.int64)
    if flat.max() >= source.free:
        raise NkiValidationError(
            f"{me}: index {int(flat.max())}; allowed: 0..{source.free - 1}, the elements per "
            "partition of data"
        )
    _gather(me, dst, data, "data", flat)
    return finish("gpsimd", "nc_n_gather", (dst,), (data, indices))


def _gather(me: str, dst: NkiTensor, src: NkiTensor, operand: str, columns: Array) -> None:
    """Store src[p, columns[p, i]] as dst[p, i]; what nothing wrote arrives as not written."""

    def taken(values: Array) -> Array:
        return np.take_along_axis(values.reshape(len(columns), -1), columns, axis=1)

    shape = dst.v.layout.shape
    if gaps := moved_gaps(me, dst, src, taken):
        with gaps:
            put(dst, taken(raw(src, me, operand)).reshape(shape), me)
    else:
        put(dst, taken(raw(src, me, operand)).reshape(shape), me)


def nc_stream_shuffle(
    dst: NkiTensor, src: NkiTensor, shuffle_mask: Sequence[int], name: str | None = None
) -> NkiInstruction:
    """In each 32-partition quadrant, dst partition i = src partition shuffle_mask[i]; 255 keeps
    dst as it is.
    """
    me = "nisa.nc_stream_shuffle"
    out, source = check_tile(me, "dst", dst), check_tile(me, "src", src)
    check_destination(me, dst)
    mask = [int(m) for m in shuffle_mask]
    if len(mask) != QUADRANT or any(not (0 <= m < QUADRANT or m == KEEP) for m in mask):
        raise NkiValidationError(
            f"{me}: shuffle_mask {mask}; allowed: {QUADRANT} entries 0..{QUADRANT - 1} or {KEEP}"
        )
    if out.dtype != source.dtype or out.free != source.free:
        raise NkiValidationError(
            f"{me}: dst is {out.dtype} with {out.free} elements per partition, src {source.dtype} "
            f"with {source.free}; both must agree"
        )
    active = -(-max(out.partitions, source.partitions) // QUADRANT) * QUADRANT
    for operand, layout in (("dst", out), ("src", source)):
        if layout.start not in allowed_starts(active):
            raise NkiValidationError(
                f"{me}: operand {operand} starts at partition {layout.start} with {active} active "
                f"partitions; allowed: {allowed_starts(active)}"
            )
    rows = [p for p in range(out.partitions) if mask[p % QUADRANT] != KEEP]
    wanted = np.array([p - p % QUADRANT + mask[p % QUADRANT] for p in rows], np.int64)
    if not rows:
        return finish("vector", "nc_stream_shuffle", (dst,), (src,))
    read = _partitions(me, src, 0, int(wanted.max()) + 1)
    missing = read.storage.unwritten_in(read.v)
    if missing is not None and missing[wanted].all():
        raw(read, me, "src")
    if missing is not None and read.storage.watch is not None:
        read.storage.watch.before_read(read.storage, read.v, me, "src")
    values = read.v.array if missing is not None else raw(read, me, "src")
    values = values[wanted].reshape((len(rows), *out.shape[1:]))
    if len(rows) == out.partitions:
        target(dst, me).array[...] = values
    else:
        for p, row in zip(rows, values, strict=True):
            put(dst[p : p + 1], row[None], me)
    if missing is not None:
        gaps = np.zeros(out.shape, np.bool_)
        gaps[rows] = missing[wanted].reshape(values.shape)
        _hand_on(dst, gaps, rows)
    return finish("vector", "nc_stream_shuffle", (dst,), (src,))


def _hand_on(dst: NkiTensor, gaps: Array, rows: list[int]) -> None:
    """The elements that arrived from where nothing was written count as not written."""
    for p in rows:
        if gaps[p].any():
            dst.storage.forget_written(dst[p : p + 1].v, gaps[p : p + 1], None)


def _partitions(me: str, src: NkiTensor, first: int, end: int) -> NkiTensor:
    """Partitions first .. end - 1 from the start of src, also beyond the view in its tile."""
    layout = src.v.layout
    if end <= layout.partitions:
        return src[first:end]
    below = src.storage.nbytes // src.storage.row_bytes - src.offset // layout.row
    if end > below:
        raise NkiValidationError(
            f"{me}: shuffle_mask reads partition {end - 1} of src, beyond the {below} of its tile"
        )
    shape, strides = (end - first, *layout.shape[1:]), (layout.row, *layout.strides[1:])
    return src.derive(shape, strides, src.offset + first * layout.row)
