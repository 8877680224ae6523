"""The 16 DMA engines of each core as servers of the DMA queues.

A queue hands over its transfers in order; the engines take the queues in turn. Transfers are cut
into slices so that a long one does not hold back another queue. HBM is one more server per core.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .constants import CostConstants
from .dma import NUM_ENGINES, Transfer
from .plan import Stream

_SLICE_NS = 500.0
_MAX_SLICES = 64


class Served(NamedTuple):
    """A transfer that ended: step, begin of its first slice and end of its last, in ns."""

    step: int
    start: float
    end: float


@dataclass(slots=True, eq=False)
class _Transfer:
    step: int
    first_byte: float
    payload: Transfer
    num_slices: int
    served: int = 0
    start: float = -1.0


@dataclass(slots=True, eq=False)
class _Queue:
    transfers: deque[_Transfer] = field(default_factory=deque)
    engine_done: NDArray[np.float64] = field(default_factory=lambda: np.zeros(NUM_ENGINES))
    """When each engine ends the slices of this queue handed to it so far."""


class DmaEngines:
    """All engines of all cores of a launch."""

    def __init__(self, constants: CostConstants) -> None:
        """Idle at time 0."""
        self._hbm_rate = constants.hbm_rate
        self._queues: dict[Stream, _Queue] = defaultdict(_Queue)
        self._engine_free: dict[int, NDArray[np.float64]] = defaultdict(
            lambda: np.zeros(NUM_ENGINES)
        )
        self._hbm_free: dict[int, float] = defaultdict(float)
        self._turns: list[tuple[float, int, Stream]] = []
        """Heap of (when the next slice of a queue could begin, tie break, queue)."""
        self._tick = 0

    @property
    def next_time(self) -> float:
        """Time of the next slice; infinite when nothing is under way."""
        return self._turns[0][0] if self._turns else inf

    def submit(self, queue: Stream, step: int, payload: Transfer, first_byte: float) -> None:
        """Append a transfer to a queue; its first byte cannot move before `first_byte`."""
        longest = float(payload.engine_ns.max(initial=0.0))
        slices = min(_MAX_SLICES, max(1, round(longest / _SLICE_NS)))
        waiting = self._queues[queue].transfers
        waiting.append(_Transfer(step, first_byte, payload, slices))
        if len(waiting) == 1:
            self._take_turn(queue)

    def _take_turn(self, queue: Stream) -> None:
        self._tick += 1
        state = self._queues[queue]
        head = state.transfers[0]
        used = head.payload.engine_ns > 0
        begin = state.engine_done[used].min() if used.any() else 0.0
        heappush(self._turns, (max(head.first_byte, float(begin)), self._tick, queue))

    def serve(self) -> Served | None:
        """Give the queue whose turn it is one slice; the transfer if that was its last one."""
        _, _, queue = heappop(self._turns)
        core = queue[0]
        state = self._queues[queue]
        head = state.transfers[0]
        work = head.payload.engine_ns / head.num_slices
        used = work > 0
        free = self._engine_free[core]
        begin = np.maximum(np.maximum(state.engine_done, head.first_byte), free)
        end = begin + work
        free[used] = end[used]
        state.engine_done[used] = end[used]
        first = float(begin[used].min()) if used.any() else head.first_byte
        last = float(end[used].max()) if used.any() else head.first_byte
        if head.payload.hbm_bytes:
            hbm = max(self._hbm_free[core], first)
            hbm += head.payload.hbm_bytes / head.num_slices / self._hbm_rate
            self._hbm_free[core] = hbm
            last = max(last, hbm)
        if head.served == 0:
            head.start = first
        head.served += 1
        finished = head.served == head.num_slices
        if finished:
            state.transfers.popleft()
        if state.transfers:
            self._take_turn(queue)
        return Served(head.step, head.start, last) if finished else None
