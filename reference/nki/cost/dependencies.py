"""Edges between instructions: read after write, write after read, write after write.

The interpreter gives program order; an edge says which earlier instruction must have got how far
before a later one may start. Memory is compared by address (`overlap.py`), so that a reused buffer
or a tile placed over another one orders its users as the hardware's semaphores would. A tile
without an address waits for the dead tiles whose room it gets (`tiles.py`).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from ..records import Access, Dma, Instruction, Record
from ..regions import SBUF_USABLE_BYTES
from .overlap import Footprint, overlaps
from .tiles import SbufRoom, Tile, tiles_of

Hazard = Literal["RAW", "WAR", "WAW", "room"]


class Edge(NamedTuple):
    """`producer` (index of the earlier instruction) and why it must come first."""

    producer: int
    hazard: Hazard


@dataclass(eq=False, slots=True)
class _Region:
    """One distinct access pattern of a storage, with who used it last."""

    access: Access
    footprint: Footprint | None = None
    """Bytes of a direct access, once something had to be compared with it."""
    writers: list["_Region"] = field(default_factory=list)
    """Written patterns that overlap it, itself included when it is written."""
    readers: list["_Region"] = field(default_factory=list)
    """Read patterns that overlap it."""
    is_written: bool = False
    is_read: bool = False
    last_write: int = -1
    reads: list[int] = field(default_factory=list)
    """Readers that a write has to wait for."""
    reads_ordered: bool = False
    """A write has waited for `reads` since the last reader came: the next reader, which waits for
    that write, stands for them."""


_EVERYTHING = (0, 1 << 60, 0, 1 << 60)


class _Storage:
    """All patterns of one storage; finds those that overlap a new one."""

    def __init__(self) -> None:
        self.regions: list[_Region] = []
        self._by_access: dict[Access, _Region] = {}
        self._hulls = np.empty((0, 4), dtype=np.int64)
        self._num_hulls = 0

    def region(self, access: Access) -> _Region:
        found = self._by_access.get(access)
        if found is None:
            found = self._by_access[access] = _Region(access)
            self.regions.append(found)
        return found

    def _add_hulls(self) -> None:
        """Bounds of the patterns that came since the last comparison."""
        if len(self.regions) > len(self._hulls):
            grown = np.empty((max(16, 2 * len(self.regions)), 4), dtype=np.int64)
            grown[: self._num_hulls] = self._hulls[: self._num_hulls]
            self._hulls = grown
        for index in range(self._num_hulls, len(self.regions)):
            region = self.regions[index]
            if region.access.indirect:
                self._hulls[index] = _EVERYTHING
            else:
                f = region.footprint = Footprint.of(region.access)
                self._hulls[index] = (f.p0, f.p1, f.start, f.stop)
        self._num_hulls = len(self.regions)

    def neighbours(self, region: _Region) -> list[_Region]:
        """Patterns that overlap this one, itself included."""
        if len(self.regions) == 1 or region.access.indirect:
            return self.regions
        self._add_hulls()
        f = region.footprint
        assert f is not None
        hulls = self._hulls[: self._num_hulls]
        near = (hulls[:, 0] < f.p1) & (hulls[:, 1] > f.p0)
        near &= (hulls[:, 2] < f.stop) & (hulls[:, 3] > f.start)
        candidates = [self.regions[i] for i in near.nonzero()[0].tolist()]
        return [r for r in candidates if r.footprint is None or overlaps(f, r.footprint)]

    def mark_written(self, region: _Region) -> None:
        """First write to a pattern: tell all that overlap it, and learn who reads there."""
        region.is_written = True
        for other in self.neighbours(region):
            other.writers.append(region)
            if other.is_read and other not in region.readers:
                region.readers.append(other)
            if other is not region and other.is_written and other not in region.writers:
                region.writers.append(other)

    def mark_read(self, region: _Region) -> None:
        region.is_read = True
        for other in self.neighbours(region):
            if other.is_written:
                if region not in other.readers:
                    other.readers.append(region)
                if other not in region.writers:
                    region.writers.append(other)


def _read(storage: _Storage, access: Access, index: int, edges: set[Edge]) -> None:
    region = storage.region(access)
    if not region.is_read:
        storage.mark_read(region)
    for written in region.writers:
        if written.last_write >= 0:
            edges.add(Edge(written.last_write, "RAW"))
    if region.reads_ordered:
        region.reads = []
        region.reads_ordered = False
    region.reads.append(index)


def _write(storage: _Storage, access: Access, index: int, edges: set[Edge]) -> None:
    region = storage.region(access)
    if not region.is_written:
        storage.mark_written(region)
    for written in region.writers:
        if 0 <= written.last_write != index:
            edges.add(Edge(written.last_write, "WAW"))
    for read in region.readers:
        edges.update(Edge(reader, "WAR") for reader in read.reads if reader != index)
        read.reads_ordered = True
    region.last_write = index


def _uses(storage: _Storage, records: Sequence[Record]) -> list[int]:
    """Users of a dead tile that the next one in its place waits for: the last one of each engine,
    and every DMA since the last write.
    """
    last: dict[str, int] = {}
    uses: list[int] = []
    for region in storage.regions:
        for index in (*region.reads, *([region.last_write] if region.is_written else ())):
            record = records[index]
            if isinstance(record, Instruction) and not isinstance(record, Dma):
                last[record.engine] = max(index, last.get(record.engine, -1))
            else:
                uses.append(index)
    return [*uses, *last.values()]


def hazards(
    records: Sequence[Record], whole_tensors: bool = False, sbuf_bytes: float = SBUF_USABLE_BYTES
) -> list[list[Edge]]:
    """Edges of each record, in the order given (program order of each core).

    Storages in HBM are shared by the cores; on-chip storages have a core's own serial numbers.
    Two cores are ordered by barriers only, so edges never cross from one core to the other.
    With `whole_tensors` an on-chip operand stands for its whole tile, as for a compiler that
    tracks one unit per tensor.
    """
    tiles = tiles_of(records)
    room = SbufRoom(tiles, sbuf_bytes)
    storages: dict[tuple[int, int], _Storage] = defaultdict(_Storage)
    result: list[list[Edge]] = []
    places: dict[Access, Access] = {}

    def seen(record: Record, access: Access) -> Access:
        """The memory alone: tiles that follow each other in one place are one pattern."""
        if whole_tensors and access.on_chip:
            access = tiles[Tile.key(record, access)].access
        if not access.tensor:
            return access
        place = places.get(access)
        if place is None:
            place = places[access] = access._replace(tensor=0)
        return place

    for index, record in enumerate(records):
        edges = {Edge(use, "room") for use in room.taken_over(index)}
        for access in record.reads:
            _read(storages[record.core, access.storage], seen(record, access), index, edges)
        for access in record.writes:
            _write(storages[record.core, access.storage], seen(record, access), index, edges)
        edges.discard(Edge(index, "RAW"))
        result.append(sorted(edges))
        for tile in room.dying(index):
            room.give(tile, _uses(storages[record.core, tile.access.storage], records))
    return result
