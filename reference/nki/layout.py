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
    view; in HBM `partitions` is 1 and `free` is the size. `start` is the first partition.
    """

    __slots__ = (
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
        "shape",
        "size",
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

    def byte_step(self, step: int) -> int:
        """Bytes for a step of `step` elements in the flat (partition, free) storage."""
        if not self.on_chip or self.pitch == self.row * self.itemsize:
            return step * self.itemsize
        partitions, free = divmod(step, self.row)
        return partitions * self.pitch + free * self.itemsize

    def covers(self, num_elements: int) -> bool:
        """Whether the view visits each of `num_elements` storage elements exactly once."""
        if self.size != num_elements:
            return False
        step = 1
        for stride, n in sorted(zip(self.strides, self.shape, strict=True)):
            if n != 1:
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
        found = _interned[key] = Layout(region, dtype, shape, strides, row, pitch, start)
    return found


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous array."""
    strides = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
