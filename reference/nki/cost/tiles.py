"""On-chip tiles of a trace: what they cover, when they live, and where room for them comes from.

A tile lives from the first to the last instruction that uses it. SBUF holds only so many bytes
per partition; a compiler gives a new tile the room of dead ones, so that it may be written once
their users are done. Which ones is the compiler's choice: here the bytes that have been free
longest, cut as needed, which is the best that any placement can do.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..records import Access, Record

Key = tuple[int, int, int]
"""(core, storage, tensor)."""


@dataclass(slots=True)
class Tile:
    """An on-chip tile; `access` is the box of all that is touched of it."""

    core: int
    access: Access
    first: int
    last: int
    """Positions of the first and the last record that use it."""

    @staticmethod
    def key(record: Record, access: Access) -> Key:
        """What identifies the tile of an operand."""
        return record.core, access.storage, access.tensor

    @property
    def nbytes(self) -> int:
        """Bytes per partition."""
        return self.access.shape[1]


def _box(access: Access) -> tuple[int, int, int, int]:
    """(first partition, last + 1, first byte, last + 1)."""
    spans = [(size - 1) * stride for size, stride in access.free_dims]
    start = access.offset + sum(s for s in spans if s < 0)
    stop = access.offset + sum(s for s in spans if s > 0) + access.itemsize
    rows = (access.shape[0] - 1) * access.strides[0] + 1
    return access.partition, access.partition + rows, start, stop


def tiles_of(records: Sequence[Record]) -> dict[Key, Tile]:
    """Every on-chip tile by its key, in order of first use."""
    lives: dict[Key, list[int]] = {}
    boxes: dict[Key, dict[Access, None]] = defaultdict(dict)
    for index, record in enumerate(records):
        for access in (*record.reads, *record.writes):
            if access.on_chip:
                key = Tile.key(record, access)
                lives.setdefault(key, [index, index])[1] = index
                boxes[key][access] = None
    tiles = {}
    for key, accesses in boxes.items():
        p0, p1, start, stop = zip(*map(_box, accesses), strict=True)
        shape = max(p1) - min(p0), max(stop) - min(start)
        some = next(iter(accesses))
        whole = Access(
            key[1], some.buffer, "uint8", 1, min(start), min(p0), shape, (1, 1), tensor=key[2]
        )
        tiles[key] = Tile(key[0], whole, *lives[key])
    return tiles


def _covered(tiles: Iterable[Tile]) -> int:
    """Bytes per partition that addressed tiles cover."""
    covered = reached = 0
    for start, nbytes in sorted((t.access.offset, t.nbytes) for t in tiles):
        covered += max(0, start + nbytes - max(start, reached))
        reached = max(reached, start + nbytes)
    return covered


class SbufRoom:
    """Gives each SBUF tile without an address the room of dead ones, in program order."""

    def __init__(self, tiles: dict[Key, Tile], sbuf_bytes: float) -> None:
        """What addressed tiles cover is taken for good."""
        self._born: dict[int, list[Tile]] = defaultdict(list)
        self._dying: dict[int, list[Tile]] = defaultdict(list)
        placed: dict[int, list[Tile]] = defaultdict(list)
        for tile in tiles.values():
            if tile.access.buffer != "sbuf":
                continue
            if tile.access.tensor:
                placed[tile.core].append(tile)
            else:
                self._born[tile.first].append(tile)
                self._dying[tile.last].append(tile)
        self._free: dict[int, deque[tuple[float, list[int]]]] = {
            core: deque([(sbuf_bytes - _covered(placed[core]), [])])
            for core in {tile.core for tile in tiles.values()}
        }
        """By core, longest free first: (bytes, records that must be done with them)."""

    def taken_over(self, index: int) -> set[int]:
        """Records that those tiles wait for that come to life at this one."""
        waits: set[int] = set()
        for tile in self._born.get(index, ()):
            needed: float = tile.nbytes
            free = self._free[tile.core]
            while needed > 0 and free:
                nbytes, uses = free.popleft()
                waits.update(uses)
                if nbytes > needed:
                    free.appendleft((nbytes - needed, uses))
                needed -= nbytes
        return waits

    def dying(self, index: int) -> list[Tile]:
        """Tiles that this record is the last to use."""
        return self._dying.get(index, [])

    def give(self, tile: Tile, uses: list[int]) -> None:
        """The room of a dead tile may be taken once `uses` are done."""
        self._free[tile.core].append((tile.nbytes, uses))
