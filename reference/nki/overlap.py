"""Tiles with explicit addresses that overlap: reading one after another was written there."""

from __future__ import annotations

import weakref

import numpy as np

from .dtypes import Array
from .errors import kernel_line
from .storage import Storage, View, Watch
from .strict import violation


class Box:
    """Partitions and bytes per partition that a tile occupies; ends are exclusive."""

    __slots__ = ("bytes", "partitions")

    def __init__(self, storage: Storage) -> None:
        rows = storage.nbytes // storage.row_bytes
        self.partitions = (storage.start, storage.start + rows)
        self.bytes = (storage.first_byte, storage.first_byte + storage.row_bytes)

    def meets(self, other: Box) -> bool:
        """Whether the two share a byte."""
        return all(
            mine[0] < theirs[1] and theirs[0] < mine[1]
            for mine, theirs in (
                (self.partitions, other.partitions),
                (self.bytes, other.bytes),
            )
        )


class OverlapWatch(Watch):
    """Bytes of one tile that a write through an overlapping tile has replaced.

    `lost` is a byte map of the tile, [partitions, bytes per partition]; `by` names the writer.
    """

    __slots__ = ("box", "by", "lost", "peers")

    def __init__(self, storage: Storage) -> None:
        self.box = Box(storage)
        self.peers: list[weakref.ref[Storage]] = []
        self.lost: Array | None = None
        self.by = ""

    def before_read(self, storage: Storage, view: View, instruction: str, operand: str) -> None:
        if self.lost is not None and _own_bytes(self.lost, view).any():
            violation(
                "address_overlap",
                f"{instruction}: operand {operand} {storage.name!r} (partitions "
                f"{self.box.partitions}, bytes {self.box.bytes}) was overwritten by {self.by}, "
                "which lies at an overlapping address; use disjoint addresses or read it before",
            )

    def before_write(self, storage: Storage, view: View, instruction: str) -> None:
        if self.lost is not None:
            _own_bytes(self.lost, view)[...] = 0
        touched: Array | None = None
        for ref in self.peers:
            peer = ref()
            if peer is None or not isinstance(peer.watch, OverlapWatch):
                continue
            if touched is None:
                touched = _touched_bytes(storage, view)
            peer.watch.lose(peer, touched, f"{instruction} to {storage.name!r}")

    def lose(self, storage: Storage, touched: Array, by: str) -> None:
        """Bytes `touched` of the arena [n, (partition, byte)] were written through another tile."""
        storage.version += 1
        (p0, p1), (b0, b1) = self.box.partitions, self.box.bytes
        partition, byte = touched
        inside = (partition >= p0) & (partition < p1) & (byte >= b0) & (byte < b1)
        if not inside.any():
            return
        if self.lost is None:
            self.lost = np.zeros(storage.nbytes, np.uint8)
        row = storage.row_bytes
        self.lost[(partition[inside] - p0) * row + byte[inside] - b0] = 1
        file, line = kernel_line()
        self.by = f"{by} ({file}:{line})"


def _own_bytes(lost: Array, view: View) -> Array:
    """The part of a tile's byte map under a view: all bytes of each element."""
    layout = view.layout
    size = layout.itemsize
    return np.ndarray(
        (*layout.shape, size),
        np.uint8,
        lost,
        view.offset * size,
        (*(s * size for s in layout.strides), 1),
    )


def _touched_bytes(storage: Storage, view: View) -> Array:
    """(partition, byte) of every byte of a view, [2, n]."""
    layout = view.layout
    flat = np.asarray(view.offset)
    for n, step in zip(layout.shape, layout.strides, strict=True):
        flat = (flat[..., None] + step * np.arange(n)).reshape(-1)
    partition, element = np.divmod(flat, layout.row)
    byte = element[:, None] * layout.itemsize + np.arange(layout.itemsize)
    wide = np.broadcast_to(partition[:, None], byte.shape)
    return np.stack([wide.reshape(-1) + storage.start, byte.reshape(-1) + storage.first_byte])


def connect(tile: Storage, others: list[weakref.ref[Storage]]) -> list[weakref.ref[Storage]]:
    """Watch `tile` and the live tiles that overlap it; returns the live tiles, `tile` included."""
    alive = []
    box = Box(tile)
    for ref in others:
        other = ref()
        if other is None:
            continue
        alive.append(ref)
        if not box.meets(Box(other)):
            continue
        for storage in (tile, other):
            if storage.watch is None:
                storage.watch = OverlapWatch(storage)
        for storage, peer in ((tile, other), (other, tile)):
            if isinstance(storage.watch, OverlapWatch):
                storage.watch.peers.append(weakref.ref(peer))
    alive.append(weakref.ref(tile))
    return alive
