"""Whether two accesses of one storage touch a common byte: exact for strided patterns."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..records import Access


@dataclass(frozen=True, eq=False)
class Footprint:
    """Bytes of an access: partitions [p0, p1), and runs of `run` bytes inside [start, stop)."""

    p0: int
    p1: int
    start: int
    stop: int
    run: int
    dims: tuple[tuple[int, int], ...]
    """(size, byte step) of the runs, largest step first; empty when one run covers it all."""

    @classmethod
    def of(cls, access: Access) -> "Footprint":
        """Footprint of a direct access; repeated reads (step 0) count once."""
        if access.on_chip:
            spread = (access.shape[0] - 1) * access.strides[0] + 1 if access.shape[0] else 0
            p0, p1 = access.partition, access.partition + spread
        else:
            p0, p1 = 0, 1
        start, run = access.offset, access.itemsize
        steps = []
        for size, stride in access.free_dims:
            if stride < 0:
                start += (size - 1) * stride
            if stride:
                steps.append((abs(stride), size))
        dims: list[tuple[int, int]] = []
        for stride, size in sorted(steps):
            if not dims and stride <= run:
                run = (size - 1) * stride + run
            elif dims and stride == dims[-1][0] * dims[-1][1]:
                dims[-1] = (dims[-1][0] * size, dims[-1][1])
            else:
                dims.append((size, stride))
        stop = start + sum((n - 1) * s for n, s in dims) + run
        if 0 in access.shape:
            p1, stop = p0, start
        return cls(p0, p1, start, stop, run, tuple(reversed(dims)))

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Sorted start bytes of all runs."""
        starts = np.array([self.start], dtype=np.int64)
        for size, stride in self.dims:
            starts = (starts[:, None] + stride * np.arange(size, dtype=np.int64)).reshape(-1)
        return np.sort(starts)

    def _index(self, strides: list[int], origin: int) -> list[tuple[int, int]] | None:
        """Half-open box in the lattice of `strides` (largest first, the last is one byte), or
        None when the pattern wraps around in a dimension or steps over itself.
        """
        sizes = {stride: size for size, stride in self.dims}
        if len(sizes) < len(self.dims):
            return None
        box, rest, outer = [], self.start - origin, None
        for stride in strides:
            first, rest = divmod(rest, stride)
            size = self.run if stride == 1 else sizes.get(stride, 1)
            if outer is not None and first + size > outer // stride:
                return None
            box.append((first, first + size))
            outer = stride
        return box


def _boxes_disjoint(a: Footprint, b: Footprint) -> bool | None:
    """Exact answer when both patterns are boxes of one row-major lattice, else None."""
    strides = sorted({s for _, s in (*a.dims, *b.dims)} | {1}, reverse=True)
    if any(big % small for big, small in pairwise(strides)):
        return None
    origin = min(a.start, b.start) // strides[0] * strides[0]
    box_a, box_b = a._index(strides, origin), b._index(strides, origin)
    if box_a is None or box_b is None:
        return None
    return any(
        hi_a <= lo_b or hi_b <= lo_a
        for (lo_a, hi_a), (lo_b, hi_b) in zip(box_a, box_b, strict=True)
    )


def overlaps(a: Footprint, b: Footprint) -> bool:
    """Whether the two touch a common byte of a common partition (partitions taken as ranges)."""
    if a.p1 <= b.p0 or b.p1 <= a.p0 or a.stop <= b.start or b.stop <= a.start:
        return False
    if a is b or (not a.dims and not b.dims):
        return True
    disjoint = _boxes_disjoint(a, b)
    if disjoint is not None:
        return not disjoint
    # Runs of b that could meet a run of a: the last one that starts before a's run ends.
    last = np.searchsorted(b.starts, a.starts + a.run, side="left") - 1
    met = last >= 0
    return bool(np.any(b.starts[last[met]] + b.run > a.starts[met]))
