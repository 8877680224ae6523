"""Work that is issued in small portions beside matmuls.

A piece of work is a generator: it issues a few instructions, yields, and goes on when there is time
again. Pieces that others wait for say how many of them are ready.
"""

from collections.abc import Iterator


class Background:
    """Queues of work; each gives one portion at a time."""

    def __init__(self) -> None:
        self._queues: list[list[Iterator[object]]] = []

    def add(self, *work: Iterator[object]) -> list[Iterator[object]]:
        """A queue of its own, whose members are done one after the other; more may be appended."""
        self._queues.append(list(work))
        return self._queues[-1]

    def drop(self, queue: list[Iterator[object]]) -> None:
        """Leave the rest of a queue to others."""
        self._queues = [other for other in self._queues if other is not queue]

    def issue(self) -> int:
        """One portion of each queue; how many there were."""
        return sum(_issue(queue) for queue in self._queues)

    def clear(self) -> None:
        """Leave what is left of all queues to others."""
        self._queues.clear()


def _issue(queue: list[Iterator[object]]) -> bool:
    while queue:
        try:
            next(queue[0])
        except StopIteration:
            del queue[0]
        else:
            return True
    return False


class Pieces(Iterator[None]):
    """Work that makes numbered pieces in order; each portion gives the number of those ready."""

    def __init__(self, work: Iterator[int]) -> None:
        self._work = work
        self.ready = 0

    def __next__(self) -> None:
        self.ready = next(self._work)

    def until(self, count: int) -> None:
        """All portions that the first `count` pieces need."""
        while self.ready < count:
            next(self)
