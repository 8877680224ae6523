"""Race detection between the two cores of a launch, on HBM that both can reach."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .core import current
from .dtypes import Array
from .errors import CoreRaceError, kernel_line
from .storage import Storage, Watch
from .strict import violation
from .view import View


class _Pending(NamedTuple):
    """A write over bytes (`conflict`) that the other core has used, with what it was before."""

    view: View
    before: Array
    conflict: Array
    rule: str
    text: str
    line: tuple[str, int]


class RaceWatch(Watch):
    """Who wrote and read each byte of a storage since the cores last met.

    Bit c of a byte of `writers` and `readers` stands for core c, bit c + 2 of `writers` for rows
    that core c scattered. A write over what the other core has used is a race only if it changes
    the bytes: two cores that store the same values give the same result in any order. `pending` is
    such a write until the next access shows what it did. Two scatters to the same row are a matter
    of the rule "scatter_duplicate". `inner` is the watch that was there before.
    """

    __slots__ = ("inner", "pending", "readers", "writers")

    def __init__(self, inner: Watch | None) -> None:
        self.inner = inner
        self.writers: Array | None = None
        self.readers: Array | None = None
        self.pending: _Pending | None = None

    def before_read(
        self,
        storage: Storage,
        view: View,
        instruction: str,
        operand: str,
        rows: Array | None = None,
    ) -> None:
        """Report a read of bytes that only the other core has written, and note the reader."""
        self.settle()
        me = 1 << current().index
        at = slice(None) if rows is None else rows
        if self.writers is not None:
            writers = storage.bytes_of(view, self.writers)[at]
            # Bytes that both have written hold the same value from either.
            theirs, mine = (writers & 5 * (3 - me)) != 0, (writers & 5 * me) != 0
            if (theirs & ~mine).any():
                violation(
                    "core_race", _text(storage, instruction, "reads", "written"), CoreRaceError
                )
            elif theirs.any():
                violation(
                    "shared_scratch",
                    f"{instruction}: core {current().index} reads bytes of {storage.name!r} that "
                    "both cores have written (with equal values) since they last met; use "
                    "private_hbm, or let one core write and put a core_barrier between",
                )
        if self.readers is None:
            self.readers = np.zeros(storage.buffer.size, np.uint8)
        storage.bytes_of(view, self.readers)[at] |= me

    def before_write(
        self, storage: Storage, view: View, instruction: str, rows: Array | None = None
    ) -> None:
        """Note the writer; a write over bytes that the other core has used waits for `settle`."""
        if self.inner is not None:
            self.inner.before_write(storage, view, instruction)
            storage.watch = self
            self.inner = None
        self.settle()
        me = 1 << current().index
        at = slice(None) if rows is None else rows
        for accesses, done in ((self.writers, "written"), (self.readers, "read")):
            if accesses is None:
                continue
            before = storage.bytes_of(view, accesses)[at]
            hit = (before & 5 * (3 - me)) != 0
            if hit.any():
                conflict = np.zeros(view.layout.shape, np.bool_)
                conflict[at] = hit
                scattered = rows is not None and done == "written" and not (before & 3 - me).any()
                rule = "scatter_duplicate" if scattered else "core_race"
                text = _text(storage, instruction, "writes", done)
                self.pending = _Pending(
                    view, view.array.copy(), conflict, rule, text, kernel_line()
                )
                break
        if self.writers is None:
            self.writers = np.zeros(storage.buffer.size, np.uint8)
        storage.bytes_of(view, self.writers)[at] |= me if rows is None else 4 * me

    def settle(self) -> None:
        """Report the pending write if it changed bytes that the other core had used."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        before, after = pending.before[pending.conflict], pending.view.array[pending.conflict]
        if before.tobytes() != after.tobytes():
            violation(pending.rule, pending.text, CoreRaceError, pending.line)


def _text(storage: Storage, instruction: str, does: str, done: str) -> str:
    core = current().index
    return (
        f"{instruction}: core {core} {does} bytes of {storage.name!r} that core {1 - core} has "
        f"{done} since the cores last met; put a core_barrier between, or split the tensor"
    )


def forget_accesses(storages: Iterable[Storage]) -> None:
    """The cores have met: what they did before is ordered with what follows."""
    for storage in storages:
        watch = storage.watch
        if isinstance(watch, RaceWatch):
            watch.settle()
            watch.writers = watch.readers = None
