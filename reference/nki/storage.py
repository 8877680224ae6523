"""Storage: the bytes behind tensors, which of them are written, and the cached views on them."""

from __future__ import annotations

import numpy as np

from .dtypes import ITEMSIZE, Array, cast, sentinel
from .errors import UninitializedReadError, at_kernel_line
from .layout import Layout, layout_of
from .psum import PsumState
from .records import Access
from .regions import ON_CHIP, PSUM, MemoryRegion
from .serial import new_serial
from .strict import level, violation
from .view import Bytes, GapOrigin, Use, View
from .written import Written


class Watch:
    """Hooks for storages whose accesses need more than the fast path."""

    __slots__ = ()

    def before_read(
        self,
        storage: Storage,
        view: View,
        instruction: str,
        operand: str,
        rows: Array | None = None,
    ) -> None:
        """Called before a read through `view`, of its rows `rows` only if given."""

    def before_write(
        self, storage: Storage, view: View, instruction: str, rows: Array | None = None
    ) -> None:
        """Called before a write through `view`, of its rows `rows` only if given."""


class Storage(Bytes):
    """Bytes of one tensor.

    `written` says that all bytes are written, `writes` which ones while not.
    `gap_origin` names the instruction that read the gaps of this tile first.
    `watched` storages take the slow path of every access: caller-owned, shared or overlapping.
    """

    __slots__ = (
        "__weakref__",
        "born",
        "copied_at",
        "first_byte",
        "gap_origin",
        "in_arena",
        "name",
        "psum",
        "region",
        "serial",
        "start",
        "use",
        "version",
        "views",
        "watch",
        "writes",
        "written",
    )

    def __init__(
        self,
        region: MemoryRegion,
        buffer: Array,
        nbytes: int,
        name: str = "",
        row_bytes: int = 0,
        pitch: int = 0,
        base: int = 0,
        start: int = 0,
        written: bool = False,
    ) -> None:
        super().__init__(buffer, nbytes, row_bytes, pitch, base)
        self.region = region
        self.name = name
        self.start = start
        self.written = written
        self.writes = Written()
        self.gap_origin: GapOrigin | None = None
        self.in_arena = False
        self.copied_at = 0
        """Line of the last plain dma_copy into an HBM tensor that no barrier has followed."""
        self.version = 0
        self.views: dict[tuple[object, ...], View] = {}
        self.use: Use | None = None
        self.psum = PsumState() if region is PSUM else None
        self.watch: Watch | None = None
        self.serial = self.born = new_serial()
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
            tensor=0 if self.serial == self.born else self.born,
        )

    def note_write(self, view: View) -> None:
        """Mark the bytes of `view` as written."""
        if not self.written:
            if not self.in_arena and view.layout.run * view.layout.itemsize == self.nbytes:
                self.written = True
            else:
                self.writes.add(self, view)
                self.written = self.writes.all(self)
        view.known = True

    def unwritten_in(self, view: View) -> Array | None:
        """Which elements of `view` nothing has written, as booleans; None when there are none."""
        if self.written or self.writes.covers(view):
            return None
        missing = self.writes.missing(self, view)
        return missing if missing.any() else None

    def forget_written(self, view: View, elements: Array, origin: GapOrigin | None) -> None:
        """Count these elements of a view that was written just now as not written."""
        if self.written and not self.in_arena:
            self.writes.add_all(self)
        self.writes.add(self, view)
        self.writes.remove(self, view, elements)
        self.gap_origin = self.gap_origin or origin
        self.written = False
        for other in self.views.values():
            other.known = False

    def poison(self, view: View) -> None:
        """Give elements that nothing wrote the value that an uninitialised one reads as."""
        missing = self.unwritten_in(view)
        if missing is not None:
            view.array[missing] = cast(np.asarray(sentinel(view.layout.dtype)), view.layout.dtype)
            self.version += 1

    def check_written(
        self, view: View, instruction: str, operand: str, used: Array | None = None
    ) -> None:
        """Report a read of bytes that nothing wrote; poison them when the rule lets it pass.

        `used` marks the elements whose value matters, None all of them.
        """
        missing = self.unwritten_in(view)
        if missing is None:
            view.known = True
            self.written |= view.layout.run * view.layout.itemsize == self.nbytes
            return
        reported = missing if used is None else missing & used.reshape(missing.shape)
        if level("uninitialized_read") != "error" or not reported.any():
            self.poison(view)
        missing = reported
        if not missing.any():
            return
        text, at = unwritten_text(instruction, operand, self.name, view, missing), None
        if self.gap_origin is not None and self.writes.removed_in(self, view)[missing].any():
            text = f"{self.gap_origin.text}, and {instruction}{at_kernel_line()} uses the result"
            at = self.gap_origin.file, self.gap_origin.line
        violation(
            "uninitialized_read",
            f"{text}; write them (memset, dma_copy, ...) before",
            UninitializedReadError,
            at,
        )


def unwritten_text(instruction: str, operand: str, name: str, view: View, missing: Array) -> str:
    """What an instruction reads that nothing has written."""
    first = tuple(int(i) for i in np.argwhere(missing)[0])
    return (
        f"{instruction}: operand {operand} {name!r} of shape {view.layout.shape} reads "
        f"{int(missing.sum())} of {view.layout.size} elements that nothing has written, first "
        f"at {first}"
    )
