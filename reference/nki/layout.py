"""Static facts of a tensor view, computed once per (region, dtype, shape, strides, ...).

Layouts are interned: two views with the same facts share one Layout object, so that an
instruction can look up its validated plan by the identity of its operands' layouts.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from .dtypes import NUMPY
from .regions import ON_CHIP, MemoryRegion


class Layout:
    """Shape, strides and everything derived from them, without the address.

    `strides` count elements of `dtype` in the flat (partition, free) storage; `row` is the number
    of elements per partition of that storage (0 in HBM), `pitch` the bytes between partitions.
    `partitions` and `free` are the partition count and the elements per partition of an on-chip
    view; in HBM `partitions` is 1 and `free` is the size. `start` is the first partition. `dense`
    says that the view visits each byte of its partitions from the first to the last, `span` is
    the number of bytes from the first to the last (valid only if `spans`), `run` the number of
    elements if they are one run of the flat storage, each visited once, else -1.
    """

    __slots__ = (
        "dense",
        "dtype",
        "free",
        "itemsize",
        "ndim",
        "np_dtype",
        "np_strides",
        "on_chip",
        "partitions",
        "pitch",
        "plain",
        "region",
        "row",
        "run",
        "shape",
        "size",
        "span",
        "spans",
        "start",
        "strides",
    )

    def __init__(
        self,
        region: MemoryRegion,
        dtype: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        row: int,
        pitch: int,
        start: int,
    ) -> None:
        self.region = region
        self.dtype = dtype
        self.shape = shape
        self.strides = strides
        self.row = row
        self.pitch = pitch
        self.start = start
        self.ndim = len(shape)
        self.np_dtype: np.dtype[Any] = NUMPY[dtype]
        self.itemsize = self.np_dtype.itemsize
        self.size = prod(shape)
        self.on_chip = region in ON_CHIP
        self.partitions = shape[0] if self.on_chip else 1
        self.free = prod(shape[1:]) if self.on_chip else self.size
        self.np_strides = tuple(self.byte_step(s) for s in strides)
        # float32 with no element visited twice: ufuncs may write it in place
        self.plain = dtype == "float32" and all(
            s != 0 or n == 1 for s, n in zip(strides, shape, strict=True)
        )

        every = sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1)
        self.run = self.size if _is_dense(every) else -1
        first = 1 if self.on_chip else 0
        dims = sorted((s, n) for s, n in zip(strides[first:], shape[first:], strict=True) if n != 1)
        self.spans = all(s >= 0 for s, _ in dims)
        self.span = (1 + sum((n - 1) * s for s, n in dims)) * self.itemsize
        self.dense = _is_dense(dims) and (not self.on_chip or shape[0] == 1 or strides[0] == row)

    def free_byte(self, offset: int) -> int:
        """Byte within its partition (HBM: within the tensor) of the element at `offset`."""
        return (offset % self.row if self.row else offset) * self.itemsize

    def byte_step(self, step: int) -> int:
        """Bytes for a step of `step` elements in the flat (partition, free) storage."""
        if not self.on_chip or self.pitch == self.row * self.itemsize:
            return step * self.itemsize
        partitions, free = divmod(step, self.row)
        return partitions * self.pitch + free * self.itemsize


def _is_dense(dims: list[tuple[int, int]]) -> bool:
    """Whether (stride, size) pairs, sorted, visit a run of elements without gap or repetition."""
    step = 1
    for stride, n in dims:
        if stride != step:
            return False
        step *= n
    return True


_interned: dict[tuple[object, ...], Layout] = {}


def layout_of(
    region: MemoryRegion,
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    row: int,
    pitch: int,
    start: int,
) -> Layout:
    """The one Layout with these facts."""
    key = (region, dtype, shape, strides, row, pitch, start)
    found = _interned.get(key)
    if found is None:
        made = Layout(region, dtype, shape, strides, row, pitch, start)
        found = _interned.setdefault(key, made)  # another thread may have been faster
    return found


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous array."""
    strides = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def is_row_major(layout: Layout) -> bool:
    """Whether the elements lie in the order of their indices, without gaps."""
    step = 1
    for n, stride in zip(reversed(layout.shape), reversed(layout.strides), strict=True):
        if n != 1 and stride != step:
            return False
        step *= n
    return True
