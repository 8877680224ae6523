"""Storage: the bytes behind tensors, which of them are written, and the cached views on them."""

from __future__ import annotations

from itertools import count
from typing import Any, Final

import numpy as np

from .dtypes import ITEMSIZE, Array, cast, sentinel
from .errors import UninitializedReadError
from .layout import Layout, layout_of
from .psum import PsumState
from .records import Access
from .regions import ON_CHIP, PSUM, MemoryRegion
from .strict import level, violation

_MASK_TYPES: Final[dict[int, Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
}
_serial = count(1)


def new_serial() -> int:
    """A number that identifies an allocation or an arena in traces."""
    return next(_serial)


class Use:
    """One on-chip allocation for the capacity account: bytes and the instructions that use it."""

    __slots__ = ("first", "last", "line", "name", "nbytes")

    def __init__(self, nbytes: int, name: str, line: tuple[str, int]) -> None:
        self.nbytes = nbytes
        self.name = name
        self.line = line
        self.first = -1
        self.last = -1


class View:
    """A layout at an offset of a storage, with its NumPy array and float32 shadow.

    `offset` counts elements of the layout's dtype in the flat storage. `known` is set once all
    its bytes are known to be written. A View never refers to its storage, so a dropped tile is
    freed at once.
    """

    __slots__ = (
        "access",
        "array",
        "f32",
        "f32_version",
        "group_epoch",
        "known",
        "layout",
        "offset",
    )

    def __init__(self, layout: Layout, offset: int, array: Array) -> None:
        self.layout = layout
        self.offset = offset
        self.array = array
        self.known = False
        self.f32: Array | None = None
        self.f32_version = -1
        self.group_epoch = -1
        self.access: Access | None = None


class Storage:
    """Bytes of one tensor.

    `row_bytes` is the number of bytes per partition (0 in HBM), `pitch` the distance between
    partitions, `base` the byte of the first element in `buffer`. `unwritten` is a byte map of
    `buffer` (1 = not written), made on the first partial write; `written` says that all is.
    `watched` storages take the slow path of every access: caller-owned, shared or overlapping.
    """

    __slots__ = (
        "__weakref__",
        "base",
        "buffer",
        "first_byte",
        "in_arena",
        "name",
        "nbytes",
        "pitch",
        "psum",
        "region",
        "row_bytes",
        "serial",
        "start",
        "unwritten",
        "use",
        "version",
        "views",
        "watch",
        "written",
    )

    def __init__(
        self,
        region: MemoryRegion,
        buffer: Array,
        nbytes: int,
        *,
        name: str = "",
        row_bytes: int = 0,
        pitch: int = 0,
        base: int = 0,
        start: int = 0,
        written: bool = False,
    ) -> None:
        self.region = region
        self.buffer = buffer
        self.nbytes = nbytes
        self.name = name
        self.row_bytes = row_bytes
        self.pitch = pitch
        self.base = base
        self.start = start
        self.written = written
        self.unwritten: Array | None = None
        self.in_arena = False
        self.version = 0
        self.views: dict[tuple[object, ...], View] = {}
        self.use: Use | None = None
        self.psum = PsumState() if region is PSUM else None
        self.watch: Watch | None = None
        self.serial = new_serial()
        self.first_byte = base - start * pitch

    def view(
        self, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> View:
        """The cached view of these elements."""
        key = (dtype, shape, strides, offset)
        found = self.views.get(key)
        if found is None:
            found = self.views[key] = self._make_view(dtype, shape, strides, offset)
        return found

    def _make_view(
        self, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> View:
        if self.region in ON_CHIP:
            row = self.row_bytes // ITEMSIZE[dtype]
            start = self.start + offset // row
            layout = layout_of(self.region, dtype, shape, strides, row, self.pitch, start)
        else:
            layout = layout_of(self.region, dtype, shape, strides, 0, 0, 0)
        return View(layout, offset, self._array(layout, offset))

    def move_to(self, buffer: Array) -> None:
        """Continue on another buffer with the same contents; cached views follow."""
        self.buffer = buffer
        for view in self.views.values():
            view.array = self._array(view.layout, view.offset)

    def _array(self, layout: Layout, offset: int) -> Array:
        return np.ndarray(
            layout.shape,
            layout.np_dtype,
            self.buffer,
            self.base + layout.byte_step(offset),
            layout.np_strides,
        )

    def access_of(self, view: View) -> Access:
        """The memory under `view` as the trace records it."""
        layout = view.layout
        if not layout.on_chip:
            byte = view.offset * layout.itemsize
            return Access(
                self.serial,
                "hbm",
                layout.dtype,
                layout.itemsize,
                byte,
                0,
                layout.shape,
                layout.np_strides,
            )
        partition, free = divmod(view.offset, layout.row)
        steps = (layout.strides[0] // layout.row, *layout.np_strides[1:])
        return Access(
            self.serial,
            "psum" if self.region is PSUM else "sbuf",
            layout.dtype,
            layout.itemsize,
            self.first_byte + free * layout.itemsize,
            self.start + partition,
            layout.shape,
            steps,
        )

    def mask_of(self, view: View) -> Array:
        """The part of the unwritten map under `view`, one integer per element, 0 = written."""
        if self.unwritten is None:
            self.unwritten = np.ones(self.buffer.shape, np.uint8)
        layout = view.layout
        return np.ndarray(
            layout.shape,
            _MASK_TYPES[layout.itemsize],
            self.unwritten,
            self.base + layout.byte_step(view.offset),
            layout.np_strides,
        )

    def bytes_of(self, view: View, marks: Array) -> Array:
        """The part of a byte map of the buffer under `view`: the first byte of each element."""
        layout = view.layout
        return np.ndarray(
            layout.shape,
            np.uint8,
            marks,
            self.base + layout.byte_step(view.offset),
            layout.np_strides,
        )

    def note_write(self, view: View) -> None:
        """Mark the bytes of `view` as written."""
        if not self.written:
            whole = view.layout.covers(self.nbytes // view.layout.itemsize)
            if not whole or self.in_arena:
                self.mask_of(view)[...] = 0
            if whole:
                self.written = True
        view.known = True

    def check_written(self, view: View, instruction: str, operand: str) -> None:
        """Report a read of bytes that nothing wrote; poison them when the rule lets it pass."""
        if not self.written:
            missing = self.mask_of(view) != 0
            if missing.any():
                first = tuple(int(i) for i in np.argwhere(missing)[0])
                num = int(missing.sum())
                if level("uninitialized_read") != "error":
                    view.array[missing] = cast(
                        np.asarray(sentinel(view.layout.dtype)), view.layout.dtype
                    )
                violation(
                    "uninitialized_read",
                    f"{instruction}: operand {operand} {self.name!r} of shape "
                    f"{view.layout.shape} reads {num} of {view.layout.size} elements that nothing "
                    f"has written, first at {first}; write them (memset, dma_copy, ...) before",
                    UninitializedReadError,
                )
                return
        view.known = True


class Watch:
    """Hooks for storages whose accesses need more than the fast path."""

    __slots__ = ()

    def before_read(self, storage: Storage, view: View, instruction: str, operand: str) -> None:
        """Called before a read through `view`."""

    def before_write(self, storage: Storage, view: View, instruction: str) -> None:
        """Called before a write through `view`."""
