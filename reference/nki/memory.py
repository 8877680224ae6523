"""On-chip memories: arenas for addressed tiles, and the capacity account of the others."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from mmap import mmap

import numpy as np

from .dtypes import Array
from .errors import CapacityError, NkiValidationError
from .overlap import PlacedTiles
from .regions import (
    NUM_PARTITIONS,
    PSUM,
    PSUM_BANK_BYTES,
    PSUM_NUM_BANKS,
    PSUM_PARTITION_BYTES,
    SBUF_PARTITION_BYTES,
    SBUF_USABLE_BYTES,
    MemoryRegion,
)
from .rules.psum_operands import check_psum_tile
from .serial import new_serial
from .storage import Storage
from .strict import violation
from .view import Use
from .written import Written


class Arena:
    """All bytes of one on-chip memory, [128 partitions, bytes per partition]."""

    def __init__(self, region: MemoryRegion) -> None:
        self.region = region
        self.pitch = PSUM_PARTITION_BYTES if region is PSUM else SBUF_PARTITION_BYTES
        self.bytes: Array = np.empty(NUM_PARTITIONS * self.pitch, np.uint8)
        # zeros of which the system makes the pages that are touched; calloc may clear all 28 MiB
        self.written: Array = np.frombuffer(mmap(-1, NUM_PARTITIONS * self.pitch), np.uint8)
        self.serial = new_serial()
        self.tiles = PlacedTiles()

    def tile(self, partitions: int, row_bytes: int, address: tuple[int, int], name: str) -> Storage:
        """A tile at (first partition, byte offset in every partition).

        Raises NkiValidationError when it does not lie inside the memory, or starts inside a
        PSUM bank.
        """
        start, byte = address
        where = f"{self.region.value} tile {name!r} at address {address}"
        if start < 0 or start + partitions > NUM_PARTITIONS:
            raise NkiValidationError(
                f"{where}: partitions {start}..{start + partitions - 1}; "
                f"the memory has 0..{NUM_PARTITIONS - 1}"
            )
        if byte < 0 or byte + row_bytes > self.pitch:
            raise CapacityError(
                f"{where}: bytes {byte}..{byte + row_bytes - 1} of each partition; "
                f"the memory has 0..{self.pitch - 1}"
            )
        if self.region is PSUM:
            if byte % PSUM_BANK_BYTES:
                raise NkiValidationError(
                    f"{where}: a PSUM address must be the start of a bank, a multiple of "
                    f"{PSUM_BANK_BYTES} bytes"
                )
            check_psum_tile(name, row_bytes)
        elif byte + row_bytes > SBUF_USABLE_BYTES:
            violation(
                "reserved_sbuf",
                f"{where}: ends at byte {byte + row_bytes}; AWS's allocators use only "
                f"{SBUF_USABLE_BYTES} bytes of each partition",
            )
        storage = Storage(
            self.region,
            self.bytes,
            partitions * row_bytes,
            name=name,
            row_bytes=row_bytes,
            pitch=self.pitch,
            base=start * self.pitch + byte,
            start=start,
        )
        storage.writes = Written(self.written)
        storage.serial = self.serial
        storage.in_arena = True
        self.tiles.add(storage)
        return storage


class BankAllocator:
    """Places unaddressed PSUM tiles for the trace: banks in turn, a small tile inside one bank.

    More tiles than fit share banks; whether that many are live is `check_capacity`'s question.
    """

    def __init__(self) -> None:
        self.serial = new_serial()
        """Identifies the core's PSUM in traces: a bank that is used again orders its users."""
        self.used = [0] * PSUM_NUM_BANKS
        self.next = 0
        self.rooms: dict[weakref.ref[Storage], tuple[int, int, int]] = {}

    def place(self, storage: Storage) -> int:
        """Byte offset for a new tile; its room is given back when the tile dies."""
        banks = -(-storage.row_bytes // PSUM_BANK_BYTES)
        size = min(storage.row_bytes, PSUM_BANK_BYTES)
        last = PSUM_NUM_BANKS - banks
        first = self.next if self.next <= last else 0
        for step in range(last + 1):
            candidate = (first + step) % (last + 1)
            if max(self.used[candidate : candidate + banks]) + size <= PSUM_BANK_BYTES:
                first = candidate
                break
        inside = self.used[first] if self.used[first] + size <= PSUM_BANK_BYTES else 0
        for b in range(first, first + banks):
            self.used[b] += size
        self.next = (first + banks) % PSUM_NUM_BANKS
        self.rooms[weakref.ref(storage, self._release)] = (first, banks, size)
        return first * PSUM_BANK_BYTES + inside

    def _release(self, ref: weakref.ref[Storage]) -> None:
        first, banks, size = self.rooms.pop(ref)
        for b in range(first, first + banks):
            self.used[b] -= size


def check_capacity(region: MemoryRegion, uses: Sequence[Use]) -> None:
    """Compare the bytes that are live at once with the memory.

    A tile is live from the first to the last instruction that uses it, which is known only when
    the kernel has ended. CapacityError (rule "capacity") is for the line whose instruction made
    the fullest moment and names the tiles that are live there.
    """
    used = [use for use in uses if use.first >= 0]
    psum = region is PSUM
    limit = PSUM_PARTITION_BYTES if psum else SBUF_USABLE_BYTES
    if psum:
        full = _fullest_banks(used)
    else:
        most, at = fullest_moment(used)
        full = at if most > SBUF_USABLE_BYTES else -1
    if full < 0:
        return
    tiles = [use for use in used if use.first <= full <= use.last]
    peak = sum(use.nbytes for use in tiles)
    largest = ", ".join(
        f"{use.name or 'tile'} {use.nbytes} B ({use.line[0]}:{use.line[1]})"
        for use in sorted(tiles, key=lambda use: -use.nbytes)[:6]
    )
    banks = f" in {PSUM_NUM_BANKS} banks, {_num_banks(tiles)} needed" if psum else ""
    violation(
        "capacity",
        f"{region.value}: {peak} bytes per partition are live at instruction {full}, "
        f"limit {limit}{banks}; {len(tiles)} tiles, the largest: {largest}; use smaller or fewer "
        "tiles, or use one for the last time before another for the first",
        CapacityError,
        next(use.first_line for use in tiles if use.first == full),
    )


def fullest_moment(used: Sequence[Use]) -> tuple[int, int]:
    """Most bytes per partition that are live at once, and at which instruction first."""
    events = sorted(
        [(use.first, 1, use.nbytes) for use in used] + [(use.last, 2, -use.nbytes) for use in used]
    )
    live = peak = 0
    full = -1
    for at, _, nbytes in events:
        live += nbytes
        if live > peak:
            peak, full = live, at
    return peak, full


def _fullest_banks(used: Sequence[Use]) -> int:
    """The first instruction at which the live tiles need more banks than there are, else -1."""
    live: list[Use] = []
    for use in sorted(used, key=lambda use: use.first):
        live = [other for other in live if other.last >= use.first]
        live.append(use)
        if len(live) > 1 and _num_banks(live) > PSUM_NUM_BANKS:
            return use.first
    return -1


def _num_banks(tiles: Sequence[Use]) -> int:
    """Banks that the tiles need; a tile smaller than a bank does not cross one (first fit)."""
    room: list[int] = []
    whole = 0
    for nbytes in sorted((use.nbytes for use in tiles), reverse=True):
        if nbytes >= PSUM_BANK_BYTES:
            whole += -(-nbytes // PSUM_BANK_BYTES)
            continue
        for i, left in enumerate(room):
            if nbytes <= left:
                room[i] -= nbytes
                break
        else:
            room.append(PSUM_BANK_BYTES - nbytes)
    return whole + len(room)
