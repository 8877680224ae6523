"""Race detection between the two cores of a launch, on HBM that both can reach."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .core import current
from .dtypes import Array
from .errors import CoreRaceError, at_kernel_line
from .storage import Storage, View, Watch
from .strict import violation


class RaceWatch(Watch):
    """Who wrote and read each byte of a storage since the cores last met.

    Bit c of a byte of `writers` and `readers` stands for core c. A write over what the other core
    has used is a race only if it changes the bytes: two cores that store the same values give the
    same result in any order. `pending` is such a write until the next access shows what it did.
    `inner` is the watch that was there before.
    """

    __slots__ = ("inner", "pending", "readers", "writers")

    def __init__(self, inner: Watch | None) -> None:
        self.inner = inner
        self.writers: Array | None = None
        self.readers: Array | None = None
        self.pending: tuple[View, Array, Array, str] | None = None

    def before_read(self, storage: Storage, view: View, instruction: str, operand: str) -> None:
        """Report a read of bytes that only the other core has written, and note the reader."""
        self.settle()
        me = 1 << current().index
        if self.writers is not None:
            # Bytes that both have written hold the same value from either.
            writers = storage.bytes_of(view, self.writers)
            if ((writers & 3) == 3 - me).any():
                violation(
                    "core_race", _text(storage, instruction, "reads", "written"), CoreRaceError
                )
        if self.readers is None:
            self.readers = np.zeros(storage.buffer.size, np.uint8)
        storage.bytes_of(view, self.readers)[...] |= me

    def before_write(self, storage: Storage, view: View, instruction: str) -> None:
        """Note the writer; a write over bytes that the other core has used waits for `settle`."""
        if self.inner is not None:
            self.inner.before_write(storage, view, instruction)
            storage.watch = self
            self.inner = None
        self.settle()
        me = 1 << current().index
        for accesses, done in ((self.writers, "written"), (self.readers, "read")):
            if accesses is None:
                continue
            conflict = (storage.bytes_of(view, accesses) & (3 - me)) != 0
            if conflict.any():
                text = _text(storage, instruction, "writes", done) + at_kernel_line()
                self.pending = (view, view.array.copy(), conflict, text)
                break
        if self.writers is None:
            self.writers = np.zeros(storage.buffer.size, np.uint8)
        storage.bytes_of(view, self.writers)[...] |= me

    def settle(self) -> None:
        """Report the pending write if it changed bytes that the other core had used."""
        if self.pending is None:
            return
        view, before, conflict, text = self.pending
        self.pending = None
        if before[conflict].tobytes() != view.array[conflict].tobytes():
            violation("core_race", text, CoreRaceError)


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
