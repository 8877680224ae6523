"""Two cores of one launch: deterministic lockstep, rendezvous, shared HBM.

One thread per core, of which exactly one runs at a time. The schedule "lockstep" hands over after
every instruction, "barrier" only when a core must wait: a kernel whose result depends on it has
a race.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, Final, Literal

import numpy as np

from .core import RUN, Core
from .errors import DeadlockError, NkiValidationError, at_kernel_line, locate
from .races import RaceWatch, forget_accesses
from .regions import MemoryRegion
from .rules.regions import check_lnc_loops
from .storage import Storage

Schedule = Literal["lockstep", "barrier"]
_schedule: list[Schedule] = ["lockstep"]


@contextmanager
def schedule(name: Schedule) -> Iterator[None]:
    """Choose how two cores alternate for the launches inside a `with` block."""
    if name not in ("lockstep", "barrier"):
        raise ValueError(f"schedule {name!r}; allowed: lockstep, barrier")
    _schedule.append(name)
    try:
        yield
    finally:
        _schedule.pop()


class _Stopped(BaseException):
    """Raised in a core whose peer has failed."""


class CorePair:
    """The two cores of a kernel[2] launch and what they share."""

    def __init__(self, arguments: list[Storage], has_grid: bool) -> None:
        self.cores = [_PairedCore(i, self, has_grid) for i in range(2)]
        self.turn = [threading.Semaphore(0) for _ in range(2)]
        self.done = [False, False]
        self.ended = [threading.Event() for _ in range(2)]
        self.waiting: list[object] = [None, None]
        self.where = ["", ""]
        """The kernel's lines at which the cores wait."""
        self.failure: BaseException | None = None
        self.shared: list[tuple[object, Storage]] = []
        self.watched = list(arguments)
        self.posts: dict[object, dict[int, Any]] = {}
        for storage in arguments:
            storage.watch = RaceWatch(storage.watch)
        for core in self.cores:
            core.switch = core.yield_turn if _schedule[-1] == "lockstep" else None

    def run(self, body: Callable[[], Any]) -> list[Any]:
        """Run `body` on both cores; the results by core. Raises what either of them raised."""
        results: list[Any] = [None, None]
        threads = [
            threading.Thread(
                target=copy_context().run, args=(self._run_core, i, body, results), daemon=True
            )
            for i in range(2)
        ]
        # not Thread.join: interrupted, it takes the thread for ended (Python 3.11)
        try:
            for thread in threads:
                thread.start()
            self.turn[0].release()
            for ended in self.ended:
                ended.wait()
        except BaseException as interrupt:  # Ctrl-C reaches the launching thread only
            self._stop(interrupt)
        for thread, ended in zip(threads, self.ended, strict=True):
            if thread.ident is not None:  # an interrupt may come before it was started
                ended.wait()
                thread.join()
        for storage in self.watched:
            watch = storage.watch
            if isinstance(watch, RaceWatch):
                storage.watch = watch.inner
                if self.failure is None:
                    watch.settle()
        if self.failure is not None:
            raise self.failure
        check_lnc_loops(self.cores)
        return results

    def _stop(self, interrupt: BaseException) -> None:
        """End both cores, wherever they wait."""
        self.failure = interrupt
        for core in self.cores:
            core.switch = core.stop
        for turn in self.turn:
            turn.release()

    def _run_core(self, index: int, body: Callable[[], Any], results: list[Any]) -> None:
        self.turn[index].acquire()
        RUN.core = self.cores[index]
        try:
            if self.failure is None:
                with np.errstate(all="ignore"):
                    results[index] = body()
                    self.cores[index].finish()
        except _Stopped:
            pass
        except BaseException as error:  # handed to the launching thread, which raises it
            if isinstance(error, NkiValidationError | TypeError | AttributeError):
                locate(error)
            if self.failure is None:
                self.failure = error
        self.done[index] = True
        self.waiting[index] = None
        other = 1 - index
        if not self.done[other]:
            if self.waiting[other] is not None and self.failure is None:
                self.failure = DeadlockError(
                    f"core {other} waits for {self.waiting[other]}{self.where[other]}, but core "
                    f"{index} has ended its kernel; both cores must execute the same sendrecv and "
                    "core_barrier"
                )
            self.turn[other].release()
        self.ended[index].set()

    def pass_turn(self, index: int) -> None:
        """Let the other core run; returns when it is this core's turn again."""
        other = 1 - index
        if self.done[other]:
            return
        self.turn[other].release()
        self.turn[index].acquire()
        if self.failure is not None:
            raise _Stopped

    def exchange(self, index: int, key: object, value: Any) -> dict[int, Any]:
        """Post a value under `key` and wait until both cores have; both values by core."""
        posts = self.posts.setdefault(key, {})
        posts[index] = value
        if len(posts) == 2:
            forget_accesses(self.watched)
            self.waiting[1 - index] = None
            return posts
        other = 1 - index
        if self.done[other] or self.waiting[other] is not None:
            what = (
                "has ended its kernel"
                if self.done[other]
                else f"waits for {self.waiting[other]}{self.where[other]}"
            )
            raise DeadlockError(
                f"core {index} waits for {key}, but core {other} {what}; both cores must execute "
                f"the same sendrecv and core_barrier in the same order{at_kernel_line()}"
            )
        self.waiting[index] = key
        self.where[index] = at_kernel_line()
        while len(posts) < 2:
            self.pass_turn(index)
        self.waiting[index] = None
        return posts


class _PairedCore(Core):
    """One of two cores."""

    def __init__(self, index: int, pair: CorePair, has_grid: bool) -> None:
        super().__init__(index, 2, has_grid)
        self.pair = pair
        self.num_shared = 0
        self.sequence: dict[object, int] = {}

    def yield_turn(self) -> None:
        """Let the other core execute an instruction, unless it waits for this one."""
        if self.pair.waiting[1 - self.index] is None:
            self.pair.pass_turn(self.index)

    def stop(self) -> None:
        """End this core after its instruction."""
        raise _Stopped

    def new_hbm(self, region: MemoryRegion, nbytes: int, name: str, identity: object) -> Storage:
        """shared_hbm tensors of the two cores are one, matched by the order of allocation."""
        if region is not MemoryRegion.shared_hbm:
            return super().new_hbm(region, nbytes, name, identity)
        at = self.num_shared
        self.num_shared += 1
        shared = self.pair.shared
        if at == len(shared):
            storage = super().new_hbm(region, nbytes, name, identity)
            storage.watch = RaceWatch(None)
            self.pair.watched.append(storage)
            shared.append((identity, storage))
        if shared[at][0] != identity:
            raise DeadlockError(
                f"shared_hbm tensor number {at} is {identity} on core {self.index} and "
                f"{shared[at][0]} on the other core; both cores must allocate the same tensors"
            )
        return shared[at][1]

    def rendezvous(self, kind: str, group: object, value: Any) -> dict[int, Any]:
        """Meet the other core in the next operation of this kind and group."""
        number = self.sequence.get((kind, group), 0)
        self.sequence[kind, group] = number + 1
        what = f"{kind} {group}" if group else kind
        return self.pair.exchange(self.index, f"{what} number {number}", value)


NUM_RANKS: Final = 2
