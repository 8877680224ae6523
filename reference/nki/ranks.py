"""Several ranks of one program, each with its own launch, that meet in collectives.

One thread per rank, of which exactly one runs at a time: a rank runs until it must wait for the
others of its group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple

from . import trace
from .core import RUN
from .errors import DeadlockError, NkiValidationError, at_kernel_line


class _Stopped(BaseException):
    """Raised in a rank when another one has failed."""


class _Key(NamedTuple):
    """One collective: its kind, the ranks in it, and how many of the kind came before."""

    kind: str
    group: tuple[int, ...]
    number: int


class World:
    """The ranks of one `run_ranks` call."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.turn = [threading.Semaphore(0) for _ in range(num_ranks)]
        self.waiting: list[tuple[_Key, dict[int, Any]] | None] = [None] * num_ranks
        self.done = [False] * num_ranks
        self.failure: BaseException | None = None
        self.posts: dict[_Key, dict[int, Any]] = {}
        self.sequence: list[dict[object, int]] = [{} for _ in range(num_ranks)]
        self.now = 0

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one body per rank; the results by rank. Raises what the first failing rank raised."""
        results: list[Any] = [None] * self.num_ranks
        threads = [
            threading.Thread(
                target=copy_context().run, args=(self._run_rank, rank, body, results), daemon=True
            )
            for rank, body in enumerate(bodies)
        ]
        for thread in threads:
            thread.start()
        self.turn[0].release()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        return results

    def _run_rank(self, rank: int, body: Callable[[], Any], results: list[Any]) -> None:
        self.turn[rank].acquire()
        try:
            if self.failure is None:
                self.now = rank
                results[rank] = body()
        except _Stopped:
            pass
        except BaseException as error:  # handed to the calling thread, which raises it
            self.failure = self.failure or error
        self.done[rank] = True
        self._hand_over(rank)

    def _hand_over(self, rank: int) -> None:
        """Let the next rank run that can; when none can, those that wait wait for ever."""
        for step in range(1, self.num_ranks + 1):
            other = (rank + step) % self.num_ranks
            if not self.done[other] and (self.failure is not None or self._is_ready(other)):
                self.turn[other].release()
                return
        blocked = [other for other in range(self.num_ranks) if not self.done[other]]
        if blocked:
            reasons = (f"rank {other} waits in {self._what(other)}" for other in blocked)
            self.failure = DeadlockError(
                f"no rank can go on: {'; '.join(reasons)}; every rank of a group must call the "
                "same collectives in the same order"
            )
            self.turn[blocked[0]].release()

    def _is_ready(self, rank: int) -> bool:
        waits = self.waiting[rank]
        return waits is None or len(waits[1]) == len(waits[0].group)

    def _what(self, rank: int) -> str:
        waits = self.waiting[rank]
        assert waits is not None
        key = waits[0]
        return f"{key.kind} number {key.number} of group {list(key.group)}"

    def exchange(self, rank: int, kind: str, group: tuple[int, ...], value: Any) -> dict[int, Any]:
        """Post a value to the group and wait until all of it have; the values by rank."""
        counts = self.sequence[rank]
        number = counts.get((kind, group), 0)
        counts[kind, group] = number + 1
        key = _Key(kind, group, number)
        posts = self.posts.setdefault(key, {})
        posts[rank] = value
        self.waiting[rank] = (key, posts)
        while len(posts) < len(group):
            self._hand_over(rank)
            self.turn[rank].acquire()
            if self.failure is not None:
                raise _Stopped
        self.waiting[rank] = None
        self.now = rank
        return posts


_worlds: list[World] = []


def current_world() -> World | None:
    """The world whose ranks run now; None in an ordinary launch."""
    return _worlds[-1] if _worlds else None


def run_ranks(
    kernel: Callable[..., Any], inputs: Sequence[Sequence[Any] | Mapping[str, Any]]
) -> list[Any]:
    """Run a kernel on len(inputs) ranks, each with its own arguments, and return their results.

    `kernel` is what one rank launches: `kernel`, or `kernel[2]` for two cores per rank. An item
    of `inputs` is a sequence of positional arguments or a mapping of named ones. Raises
    NkiValidationError inside a kernel, inside another run_ranks, or while a trace is recorded
    (a trace is of one rank), and DeadlockError when ranks wait for each other for ever.
    """
    if RUN.core is not None or _worlds:
        raise NkiValidationError(
            f"run_ranks inside a kernel or another run_ranks{at_kernel_line()}"
        )
    if trace.active is not None:
        raise NkiValidationError("run_ranks while a trace is recorded: a trace is of one rank")
    if not inputs:
        raise NkiValidationError("run_ranks with inputs of length 0; allowed: one item per rank")

    def body(arguments: Sequence[Any] | Mapping[str, Any]) -> Callable[[], Any]:
        if isinstance(arguments, Mapping):
            return lambda: kernel(**arguments)
        return lambda: kernel(*arguments)

    world = World(len(inputs))
    _worlds.append(world)
    try:
        return world.run([body(arguments) for arguments in inputs])
    finally:
        _worlds.remove(world)
