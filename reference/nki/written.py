"""Which bytes of a storage have been written.

Most writes cover whole rows of bytes in all partitions: those are kept as intervals. Anything else
goes to a byte map, which is made when it is first needed.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .dtypes import Array

if TYPE_CHECKING:
    from .view import Bytes, View

_MAP_TYPES: Final[dict[int, Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}
_WRITTEN: Final = 0xFF
_REMOVED: Final = 0x02


def _each(view: View, byte: int) -> int:
    """An element of the map, all of whose bytes are `byte`."""
    return int.from_bytes([byte] * view.layout.itemsize, "little")


class Written:
    """Written bytes of one storage: intervals [start, end) of the bytes of every partition, and
    a map of the buffer that may lag behind the intervals. It begins as zeros.
    """

    __slots__ = ("_ends", "_map", "_pending", "_shared", "_starts")

    def __init__(self, shared_map: Array | None = None) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._pending: list[tuple[int, int]] = []
        self._map = shared_map
        self._shared = shared_map is not None

    def add(self, storage: Bytes, view: View) -> None:
        """The bytes of `view` are written now."""
        layout = view.layout
        if not self._shared and layout.dense and layout.partitions == storage.num_rows:
            start = layout.free_byte(view.offset)
            self._insert(start, start + layout.free * layout.itemsize)
        else:
            self.mark(storage, view, ...)

    def mark(self, storage: Bytes, view: View, elements: Any) -> None:
        """These elements of `view` are written now."""
        self._map_of(storage, view)[elements] = _each(view, _WRITTEN)

    def missing(self, storage: Bytes, view: View) -> Array:
        """Which elements of `view` have a byte that is not written."""
        found: Array = self._map_of(storage, view) != _each(view, _WRITTEN)
        return found

    def add_all(self, storage: Bytes) -> None:
        """Every byte is written now."""
        self._insert(0, storage.row_bytes or storage.nbytes)

    def remove(self, storage: Bytes, view: View, elements: Array) -> None:
        """These elements of `view` count as not written; from here on only the map is exact."""
        self._map_of(storage, view)[elements] = _each(view, _REMOVED)
        self._starts.clear()
        self._ends.clear()

    def removed_in(self, storage: Bytes, view: View) -> Array:
        """Which elements of `view` count as not written because of `remove`."""
        marks: Array = self._map_of(storage, view) == _each(view, _REMOVED)
        return marks

    def _insert(self, start: int, end: int) -> None:
        self._pending.append((start, end))
        starts, ends = self._starts, self._ends
        at = bisect_right(starts, start)
        if at and ends[at - 1] >= start:
            at -= 1
            start = starts[at]
            end = max(end, ends[at])
            del starts[at], ends[at]
        while at < len(starts) and starts[at] <= end:
            end = max(end, ends[at])
            del starts[at], ends[at]
        starts.insert(at, start)
        ends.insert(at, end)

    def all(self, storage: Bytes) -> bool:
        """Whether the intervals cover every byte."""
        return (
            len(self._starts) == 1
            and self._starts[0] == 0
            and self._ends[0] == (storage.row_bytes or storage.nbytes)
        )

    def covers(self, view: View) -> bool:
        """Whether the intervals show that all of `view` is written; False = look at the map."""
        layout = view.layout
        start = layout.free_byte(view.offset)
        at = bisect_right(self._starts, start)
        return bool(at) and layout.spans and self._ends[at - 1] >= start + layout.span

    def _map_of(self, storage: Bytes, view: View) -> Array:
        """The map under `view`, one integer per element."""
        if self._map is None:
            self._map = np.zeros(storage.buffer.shape, np.uint8)
        if self._pending:
            rows = storage.byte_rows(self._map)
            for start, end in self._pending:
                rows[:, start:end] = _WRITTEN
            self._pending.clear()
        layout = view.layout
        return np.ndarray(
            layout.shape,
            _MAP_TYPES[layout.itemsize],
            self._map,
            storage.base + layout.byte_step(view.offset),
            layout.np_strides,
        )
