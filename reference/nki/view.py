"""What a storage is made of: its bytes, the views on them, and what is known about them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .dtypes import Array
from .layout import Layout
from .records import Access


class Use:
    """One on-chip allocation for the capacity account: bytes and the instructions that use it.

    `line` allocates it, `first` and `last` number the instructions between which it is live,
    `first_line` is the kernel's line of the first.
    """

    __slots__ = ("first", "first_line", "last", "line", "name", "nbytes")

    def __init__(self, nbytes: int, name: str, line: tuple[str, int]) -> None:
        self.nbytes = nbytes
        self.name = name
        self.line = line
        self.first_line = line
        self.first = -1
        self.last = -1


class View:
    """A layout at an offset of a storage, with its NumPy array and float32 shadow.

    `offset` counts elements of the layout's dtype in the flat storage. `known` is set once all
    its bytes are known to be written, `placed` once it lies in PSUM as an operand may. A View never
    refers to its storage, so a dropped tile is freed at once.
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
        "placed",
    )

    def __init__(self, layout: Layout, offset: int, array: Array) -> None:
        self.layout = layout
        self.offset = offset
        self.array = array
        self.known = False
        self.placed = False
        self.f32: Array | None = None
        self.f32_version = -1
        self.group_epoch = -1
        self.access: Access | None = None


class GapOrigin(NamedTuple):
    """The first instruction that read the unwritten elements of a tile: message and line."""

    text: str
    file: str
    line: int


class Bytes:
    """The memory of one tensor.

    `row_bytes` is the number of bytes per partition (0 in HBM), `pitch` the distance between
    partitions, `base` the byte of the first element in `buffer`.
    """

    __slots__ = ("base", "buffer", "nbytes", "pitch", "row_bytes")

    def __init__(self, buffer: Array, nbytes: int, row_bytes: int, pitch: int, base: int) -> None:
        self.buffer = buffer
        self.nbytes = nbytes
        self.row_bytes = row_bytes
        self.pitch = pitch
        self.base = base

    @property
    def num_rows(self) -> int:
        """Partitions of an on-chip tile; 1 in HBM."""
        return self.nbytes // self.row_bytes if self.row_bytes else 1

    def byte_rows(self, marks: Array) -> Array:
        """A byte map of the buffer as [rows, bytes per row] of this storage."""
        if not self.row_bytes:
            return marks.reshape(1, -1)
        return np.ndarray(
            (self.num_rows, self.row_bytes), np.uint8, marks, self.base, (self.pitch, 1)
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
