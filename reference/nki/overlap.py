"""Tiles with explicit addresses that overlap: reading one after another was written there."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np

from .dtypes import Array
from .errors import kernel_line
from .storage import Storage, Watch
from .strict import violation
from .view import View


class Box(NamedTuple):
    """A rectangle of partitions p0..p1 and bytes b0..b1 of each; the ends are exclusive."""

    p0: int
    p1: int
    b0: int
    b1: int

    def meet(self, other: Box) -> Box | None:
        """The common part, None when there is none."""
        p0, p1 = max(self.p0, other.p0), min(self.p1, other.p1)
        b0, b1 = max(self.b0, other.b0), min(self.b1, other.b1)
        return Box(p0, p1, b0, b1) if p0 < p1 and b0 < b1 else None

    def without(self, other: Box) -> list[Box]:
        """What remains outside `other`: up to four rectangles."""
        common = self.meet(other)
        if common is None:
            return [self]
        parts = (
            Box(self.p0, common.p0, self.b0, self.b1),
            Box(common.p1, self.p1, self.b0, self.b1),
            Box(common.p0, common.p1, self.b0, common.b0),
            Box(common.p0, common.p1, common.b1, self.b1),
        )
        return [part for part in parts if part.p0 < part.p1 and part.b0 < part.b1]


def box_of_tile(storage: Storage) -> Box:
    """The rectangle of a whole tile."""
    return Box(
        storage.start,
        storage.start + storage.num_rows,
        storage.first_byte,
        storage.first_byte + storage.row_bytes,
    )


def boxes_of_view(storage: Storage, view: View) -> list[Box]:
    """Rectangles that hold exactly the bytes of a view; neighbouring bytes are joined."""
    layout = view.layout
    size = layout.itemsize
    start = layout.start if layout.strides[0] else storage.start + view.offset // layout.row
    stop = start + (layout.partitions if layout.strides[0] else 1)
    first = storage.first_byte + layout.free_byte(view.offset)
    if layout.dense:
        return [Box(start, stop, first, first + layout.free * size)]
    elements = np.zeros(1, np.int64)
    for n, step in zip(layout.shape[1:], layout.strides[1:], strict=True):
        elements = (elements[:, None] + step * np.arange(n)).reshape(-1)
    elements = np.unique(elements)
    breaks = np.flatnonzero(np.diff(elements) != 1)
    starts = elements[np.r_[0, breaks + 1]] * size + first
    ends = (elements[np.r_[breaks, len(elements) - 1]] + 1) * size + first
    return [Box(start, stop, int(a), int(b)) for a, b in zip(starts, ends, strict=True)]


class OverlapWatch(Watch):
    """Bytes of one tile that a write through an overlapping tile has replaced.

    `own` holds disjoint rectangles that were last written through this tile, `lost` those that
    were until another tile wrote there; `by` names the last such writer. Bytes that only another
    tile ever wrote are in neither: reading them is how kernels alias memory on purpose.
    """

    __slots__ = ("box", "by", "lost", "own", "peers")

    def __init__(self, storage: Storage) -> None:
        self.box = box_of_tile(storage)
        self.peers: list[weakref.ref[Storage]] = []
        # which bytes an earlier, unwatched tile wrote is not known: all of them, if any
        self.own = [self.box] if storage.version else []
        self.lost: list[Box] = []
        self.by = ""

    def before_read(
        self,
        storage: Storage,
        view: View,
        instruction: str,
        operand: str,
        rows: Array | None = None,
    ) -> None:
        """Report a read of bytes that a write through an overlapping tile has replaced."""
        if not self.lost:
            return
        for box in boxes_of_view(storage, view):
            if any(box.meet(lost) for lost in self.lost):
                violation(
                    "address_overlap",
                    f"{instruction}: operand {operand} {storage.name!r} (partitions "
                    f"{self.box.p0}..{self.box.p1 - 1}, bytes {self.box.b0}..{self.box.b1 - 1}) "
                    f"was overwritten by {self.by}, which lies at an overlapping address; use "
                    "disjoint addresses or read it before",
                )
                return

    def before_write(
        self, storage: Storage, view: View, instruction: str, rows: Array | None = None
    ) -> None:
        """Take the view's bytes for this tile and from every overlapping one."""
        boxes = boxes_of_view(storage, view)
        if boxes == [self.box]:
            self.own, self.lost = boxes, []
        elif self.own != [self.box]:
            for box in boxes:
                self.own = [*_outside(self.own, box), box]
                self.lost = _outside(self.lost, box)
        gone = False
        for ref in self.peers:
            peer = ref()
            if peer is None:
                gone = True
            elif isinstance(peer.watch, OverlapWatch):
                peer.watch.lose(peer, boxes, instruction, storage.name)
        if gone:
            self.peers = [ref for ref in self.peers if ref() is not None]

    def lose(self, storage: Storage, boxes: list[Box], instruction: str, writer: str) -> None:
        """These rectangles were written through another tile."""
        storage.version += 1
        if not self.own:
            return
        before = len(self.lost)
        for box in boxes:
            if box.meet(self.box) is not None:
                self.lost += [part for own in self.own if (part := own.meet(box)) is not None]
                self.own = _outside(self.own, box)
        if len(self.lost) > before:
            file, line = kernel_line()
            self.by = f"{instruction} to {writer!r} ({file}:{line})"


def _outside(boxes: list[Box], hole: Box) -> list[Box]:
    return [part for box in boxes for part in box.without(hole)]


class PlacedTiles:
    """The live tiles of one arena with their rectangles."""

    def __init__(self) -> None:
        self._tiles: list[tuple[int, int, int, int, weakref.ref[Storage]]] = []

    def add(self, tile: Storage) -> None:
        """Place a tile; it and the live tiles that overlap it are watched from now on."""
        box = box_of_tile(tile)
        p0, p1, b0, b1 = box
        overlapping = [
            ref
            for q0, q1, c0, c1, ref in self._tiles
            if q0 < p1 and p0 < q1 and c0 < b1 and b0 < c1
        ]
        dead = False
        for ref in overlapping:
            other = ref()
            if other is None:
                dead = True
                continue
            for storage, peer in ((tile, other), (other, tile)):
                if storage.watch is None:
                    storage.watch = OverlapWatch(storage)
                if isinstance(storage.watch, OverlapWatch):
                    storage.watch.peers.append(weakref.ref(peer))
        if dead:
            self._tiles = [placed for placed in self._tiles if placed[4]() is not None]
        self._tiles.append((*box, weakref.ref(tile)))
