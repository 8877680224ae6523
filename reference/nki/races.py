"""Race detection between the two cores of a launch, on HBM that both can reach."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .core import current
from .dtypes import Array
from .errors import CoreRaceError
from .storage import Storage, View, Watch
from .strict import violation


class RaceWatch(Watch):
    """Who wrote and read each byte of a storage since the cores last met.

    Bit c of a byte of `writers` and `readers` stands for core c. `inner` is the watch that was
    there before.
    """

    __slots__ = ("inner", "readers", "writers")

    def __init__(self, inner: Watch | None) -> None:
        self.inner = inner
        self.writers: Array | None = None
        self.readers: Array | None = None

    def before_read(self, storage: Storage, view: View, instruction: str, operand: str) -> None:
        me = 1 << current().index
        if self.writers is not None and _any_other(storage.bytes_of(view, self.writers), me):
            _race(storage, instruction, "reads", "written")
        if self.readers is None:
            self.readers = np.zeros(storage.buffer.size, np.uint8)
        storage.bytes_of(view, self.readers)[...] |= me

    def before_write(self, storage: Storage, view: View, instruction: str) -> None:
        if self.inner is not None:
            self.inner.before_write(storage, view, instruction)
            storage.watch = self
            self.inner = None
        me = 1 << current().index
        if self.writers is not None and _any_other(storage.bytes_of(view, self.writers), me):
            _race(storage, instruction, "writes", "written")
        if self.readers is not None and _any_other(storage.bytes_of(view, self.readers), me):
            _race(storage, instruction, "writes", "read")
        if self.writers is None:
            self.writers = np.zeros(storage.buffer.size, np.uint8)
        storage.bytes_of(view, self.writers)[...] |= me


def _any_other(accesses: Array, me: int) -> bool:
    return bool((accesses & (3 - me)).any())


def _race(storage: Storage, instruction: str, does: str, done: str) -> None:
    core = current().index
    violation(
        "core_race",
        f"{instruction}: core {core} {does} bytes of {storage.name!r} that core {1 - core} has "
        f"{done} since the cores last met; put a core_barrier between, or split the tensor",
        CoreRaceError,
    )


def forget_accesses(storages: Iterable[Storage]) -> None:
    """The cores have met: what they did before is ordered with what follows."""
    for storage in storages:
        watch = storage.watch
        if isinstance(watch, RaceWatch):
            watch.writers = watch.readers = None
