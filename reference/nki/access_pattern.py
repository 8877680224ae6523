"""`.ap`, vector_select, and the resolution of run-time addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from .dtypes import INTEGERS, ITEMSIZE, Array, dtype_name
from .errors import NkiValidationError, OutOfBoundsError, OutsidePatternError, at_kernel_line
from .layout import is_row_major
from .regions import SBUF
from .registers import RunTimeValue
from .rules.views import MAX_DIMS, check_ap_view, check_rank
from .strided import Dynamic, Strided
from .view import View

Tensor = TypeVar("Tensor", bound=Strided)


def ap(
    t: Tensor,
    pattern: Sequence[Sequence[int]],
    offset: int | None,
    scalar_offset: Any,
    vector_offset: Any,
    indirect_dim: int,
    dtype: str | None,
) -> Tensor:
    """NkiTensor.ap.

    Pattern and offset count elements of the flat storage, from the first element of the view. On
    chip, a partition step that is no multiple of the storage's row but of the view's row counts
    rows of the view (third-party kernels rely on both readings).
    """
    layout = t.v.layout
    if t.dynamic is not None:
        raise NkiValidationError(".ap on a view that has a run-time address already")
    pairs = tuple([(int(pair[0]), int(pair[1])) for pair in pattern])
    rows_at_run_time = vector_offset is not None
    key = (layout, t.v.offset, t.storage.nbytes, pairs, offset, dtype, rows_at_run_time)
    found = _patterns.get(key)
    if found is None:
        try:
            found = _patterns[key] = _pattern(t, pairs, offset, dtype, rows_at_run_time)
        except OutsidePatternError as error:
            return t.unusable(error)
    if layout.size * layout.itemsize != t.storage.nbytes or not is_row_major(layout):
        check_ap_view(t.name, t.shape, t.offset, pairs)
    if len(pairs) > MAX_DIMS:
        check_rank(f".ap of {t.name!r}", found[1], layout.on_chip)
    name, shape, strides, start = found
    dynamic = None
    if scalar_offset is not None or rows_at_run_time:
        if scalar_offset is not None and rows_at_run_time:
            raise NkiValidationError(".ap: scalar_offset and vector_offset exclude each other")
        if not 0 <= indirect_dim < layout.ndim:
            raise NkiValidationError(f".ap indirect_dim {indirect_dim} of shape {t.shape}")
        step = layout.strides[indirect_dim]
        if ITEMSIZE[name] != layout.itemsize:
            step = _rescaled(step * layout.itemsize, ITEMSIZE[name], ".ap indirect stride")
        if rows_at_run_time:
            _check_vector(t, vector_offset, indirect_dim)
            dynamic = Dynamic(vector_offset, step, vector=True, dim=0)
        else:
            _check_scalar(scalar_offset, layout.on_chip)
            if layout.on_chip and indirect_dim == 0:
                raise NkiValidationError(
                    ".ap scalar_offset with indirect_dim=0 on chip: the partition dimension "
                    "cannot be dynamic; use a free dimension"
                )
            dynamic = Dynamic(scalar_offset, step, vector=False, dim=-1)
    return t.on(t.storage.view(name, shape, strides, start), dynamic)


Resolved = tuple[str, tuple[int, ...], tuple[int, ...], int]
_patterns: dict[tuple[object, ...], Resolved] = {}


def _pattern(
    t: Strided,
    pairs: tuple[tuple[int, int], ...],
    offset: int | None,
    dtype: str | None,
    rows_at_run_time: bool,
) -> Resolved:
    """(dtype, shape, strides, start) in elements of the storage, validated."""
    layout = t.v.layout
    name = layout.dtype if dtype is None else dtype_name(dtype)
    strides, shape = tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
    if not shape or any(n < 1 for n in shape):
        raise NkiValidationError(f".ap pattern {pairs}: every count must be at least 1")
    move = 0 if offset is None else int(offset)
    base = t.offset
    if ITEMSIZE[name] != layout.itemsize:
        base = _rescaled(base * layout.itemsize, ITEMSIZE[name], ".ap offset of the view")
    if layout.on_chip:
        row = t.storage.row_bytes // ITEMSIZE[name]
        strides, move = _on_chip_pattern(t, name, shape, strides, move, row)
        _check_row(t, shape, strides, base + move, row)
    if rows_at_run_time:
        strides = (0,) + strides[1:]
    first = 1 if rows_at_run_time else 0
    check_extent(t, name, shape, strides, base + move, first)
    return name, shape, strides, base + move


def _reach(shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> tuple[int, int]:
    """First and last element of a partition that the free part of a pattern reaches."""
    free = list(zip(shape[1:], strides[1:], strict=True))
    low = start + sum((n - 1) * s for n, s in free if s < 0)
    return low, start + sum((n - 1) * s for n, s in free if s > 0)


def _check_row(
    t: Strided, shape: tuple[int, ...], strides: tuple[int, ...], start: int, row: int
) -> None:
    """The free part of an on-chip pattern stays inside the partition's bytes of the tile."""
    low, high = _reach(shape, strides, start % row)
    if low < 0 or high >= row:
        raise OutsidePatternError(
            f".ap of {t.name!r}: the free part reaches elements {low}..{high} of a partition; the "
            f"tile has 0..{row - 1} (a pattern cannot go on in the next partition)"
        )


def _on_chip_pattern(
    t: Strided, name: str, shape: tuple[int, ...], strides: tuple[int, ...], move: int, row: int
) -> tuple[tuple[int, ...], int]:
    """Partition step and offset in storage elements; NkiValidationError for a partition stride."""
    step = strides[0]
    view_row = t.v.layout.free * t.v.layout.itemsize // ITEMSIZE[name]
    if step % row == 0 or shape[0] == 1:
        return strides, move
    if step % view_row == 0:
        partitions, inner = divmod(move, view_row)
        return (step // view_row * row, *strides[1:]), partitions * row + inner
    raise NkiValidationError(
        f".ap pattern: partition step {step} of {t.name!r}; it must be {row}, the elements per "
        "partition of the tile (0 repeats one partition)"
    )


def check_extent(
    t: Strided,
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    start: int,
    first: int = 0,
) -> None:
    """NkiValidationError when a pattern leaves its storage; dimensions before `first` are free."""
    low = high = start
    for n, stride in zip(shape[first:], strides[first:], strict=True):
        if stride >= 0:
            high += (n - 1) * stride
        else:
            low += (n - 1) * stride
    total = t.storage.nbytes // ITEMSIZE[dtype]
    if low < 0 or high >= total:
        raise OutsidePatternError(
            f".ap of {t.name!r}: elements {low}..{high} for a storage of {total} "
            f"{dtype} elements; shape {shape}, strides {strides}, offset {start}"
        )


def _rescaled(nbytes: int, itemsize: int, what: str) -> int:
    if nbytes % itemsize:
        raise NkiValidationError(f"{what}: {nbytes} bytes is no multiple of {itemsize}")
    return nbytes // itemsize


def _check_scalar(index: Any, on_chip: bool) -> None:
    if isinstance(index, RunTimeValue):
        index.check_address(".ap scalar_offset", on_chip=on_chip)
        return
    if not isinstance(index, Strided):
        raise NkiValidationError(
            f".ap scalar_offset is {type(index).__name__}; allowed: a run-time value or a "
            "one-element SBUF tensor"
        )
    if index.dtype not in INTEGERS:
        raise NkiValidationError(
            f".ap scalar_offset {index.name!r} has dtype {index.dtype}; allowed: integers"
        )
    if index.buffer is not SBUF or index.size != 1:
        raise NkiValidationError(
            f".ap scalar_offset {index.name!r} of shape {index.shape} in {index.buffer.value}; "
            "allowed: one element in SBUF"
        )


def _check_vector(t: Strided, index: Any, dim: int) -> None:
    if not isinstance(index, Strided) or index.buffer is not SBUF:
        raise NkiValidationError(".ap vector_offset must be an SBUF tensor of indices")
    if index.dtype not in ("int32", "uint32"):
        raise NkiValidationError(
            f".ap vector_offset has dtype {index.dtype}; allowed: int32, uint32"
        )
    if t.v.layout.on_chip:
        raise NkiValidationError(
            f".ap vector_offset on {t.name!r} in {t.buffer.value}: only HBM tensors"
        )
    if dim != 0:
        raise NkiValidationError(f".ap vector_offset with indirect_dim={dim}; allowed: 0")


def vector_select(t: Tensor, dim: int, vector_offset: Any) -> Tensor:
    """NkiTensor.vector_select."""
    if t.dynamic is not None:
        raise NkiValidationError("vector_select on a view that has a run-time address already")
    _check_vector(t, vector_offset, dim)
    shape = (vector_offset.shape[0],) + t.shape[1:]
    view = t.storage.view(t.dtype, shape, (0,) + t.strides[1:], t.offset)
    return t.on(view, Dynamic(vector_offset, t.strides[0], vector=True, dim=0))


def read_index(index: Any, instruction: str) -> int:
    """The value of a run-time value or a one-element tensor now."""
    if isinstance(index, RunTimeValue):
        return index.value
    if not index.v.known:
        index.storage.check_written(index.v, instruction, "scalar_offset")
    return int(index.v.array.reshape(-1)[0])


def scalar_index(t: Strided, instruction: str) -> Array:
    """The value of a scalar offset, as an array of one."""
    assert t.dynamic is not None
    return np.array([read_index(t.dynamic.index, instruction)])


def resolve(t: Strided, instruction: str) -> View | None:
    """The view at the run-time address of a scalar offset; None when it is out of bounds."""
    dynamic = t.dynamic
    assert dynamic is not None
    layout = t.v.layout
    index = read_index(dynamic.index, instruction)
    if dynamic.last >= 0 and not 0 <= index <= dynamic.last:
        return None
    start = t.v.offset + index * dynamic.step
    if layout.on_chip:
        row = layout.row
        low, high = _reach(layout.shape, layout.strides, start % row)
        if start // row != t.v.offset // row or low < 0 or high >= row:
            return None
        return t.storage.view(layout.dtype, layout.shape, layout.strides, start)
    last = start + sum((n - 1) * s for n, s in zip(layout.shape, layout.strides, strict=True))
    if start < 0 or last >= t.storage.nbytes // layout.itemsize:
        return None
    return t.storage.view(layout.dtype, layout.shape, layout.strides, start)


def out_of_bounds(t: Strided, instruction: str, operand: str) -> OutOfBoundsError:
    """The error for a scalar offset that leaves the tensor."""
    dynamic = t.dynamic
    assert dynamic is not None
    index = read_index(dynamic.index, instruction)
    if dynamic.last >= 0 and not 0 <= index <= dynamic.last:
        return OutOfBoundsError(
            f"{instruction}: operand {operand} {t.name!r}: run-time index {index} on a dimension "
            f"that has 0..{dynamic.last} for it, as for a static index{at_kernel_line()}"
        )
    num = f"{t.storage.nbytes // t.v.layout.itemsize} elements of the tensor"
    if t.v.layout.on_chip:
        num = f"{t.v.layout.row} elements of a partition (each is a memory of its own)"
    return OutOfBoundsError(
        f"{instruction}: operand {operand} {t.name!r}: scalar offset {index} x step "
        f"{dynamic.step} leaves the {num}; pass "
        f"oob_mode=nisa.oob_mode.skip to dma_copy to leave such rows out{at_kernel_line()}"
    )


def row_indices(t: Strided, instruction: str) -> tuple[Array, Array]:
    """(indices, in range) of a vector offset, one per row of dimension 0, flattened by column."""
    dynamic = t.dynamic
    assert dynamic is not None
    tile = dynamic.index
    assert not isinstance(tile, RunTimeValue)
    if not tile.v.known:
        tile.storage.check_written(tile.v, instruction, "vector_offset")
    rows = tile.v.array.reshape(tile.shape[0], -1).T.reshape(-1)
    num = t.shape[0]
    if rows.size < num:
        raise NkiValidationError(
            f"{instruction}: {rows.size} row indices for {num} rows of {t.name!r}"
        )
    indices = rows[:num].astype(np.int64)
    layout = t.v.layout
    inner = sum((n - 1) * s for n, s in zip(layout.shape[1:], layout.strides[1:], strict=True))
    room = t.storage.nbytes // layout.itemsize - t.v.offset - inner
    num_rows = -(-room // dynamic.step)
    return indices, (indices >= 0) & (indices < num_rows)
