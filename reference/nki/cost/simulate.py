"""Discrete-event evaluation of a plan: when each step starts, and what it waited for.

Each stream issues in program order. Events are taken in order of time, so that shared resources
(DMA engines, HBM, PSUM banks, the SBUF port) are granted as on the device.
"""

from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from .constants import CostConstants
from .dma_engines import DmaEngines
from .plan import Meeting, Plan, Step, Stream
from .resources import Cause, Resources


@dataclass(slots=True)
class Timing:
    """Times of one step, in ns, and what set its start."""

    start: float = -1.0
    """When it was issued."""
    free: float = -1.0
    """When its engine had finished reading and could go on."""
    done: float = -1.0
    """When another step could see its result, without the hop; -1 while unknown."""
    stream_free: float = 0.0
    """When its stream had become free before it."""
    cause: Cause = "start"
    after: int = -1
    """Step that set the start; -1 for none."""
    transfer_start: float = -1.0
    """When the DMA engines began with it; -1 if it is no DMA."""


@dataclass(slots=True, eq=False)
class _Issuer:
    """State of one stream."""

    order: list[Step]
    free: float = 0.0
    done: float = 0.0
    """When all its compute results so far are there."""
    last: int = -1
    """Last step that it started."""
    table: str = ""
    """Activation function that is loaded."""
    position: int = 0
    idle_since: float = -inf
    """When the Tensor Engine ended its last matmul."""
    slow_until: float = 0.0
    """End of the Tensor Engine's ramp to full speed."""

    @property
    def head(self) -> Step | None:
        """The step to start next."""
        return self.order[self.position] if self.position < len(self.order) else None


class Simulation:
    """One evaluation of a plan; `run` may be called once."""

    def __init__(self, plan: Plan, constants: CostConstants) -> None:
        """Everything is free at time 0."""
        self._steps = plan.steps
        self._c = constants
        self._timings = [Timing() for _ in plan.steps]
        self._missing = [len(step.edges) for step in plan.steps]
        self._consumers: list[list[Step]] = [[] for _ in plan.steps]
        for step in plan.steps:
            for edge in step.edges:
                self._consumers[edge.producer].append(step)
        self._issuers = {stream: _Issuer(steps) for stream, steps in plan.streams.items()}
        self._issue_free: dict[Stream, float] = defaultdict(float)
        self._resources = Resources()
        self._dma = DmaEngines(constants)
        self._arrived: dict[int, list[tuple[float, Step]]] = defaultdict(list)
        self._events: list[tuple[float, int, Stream | Meeting]] = []
        self._tick = 0

    def run(self) -> list[Timing]:
        """Times of all steps, by index. RuntimeError if some can never start."""
        for issuer in self._issuers.values():
            self._announce_head(issuer)
        while self._events or self._dma.next_time < inf:
            if not self._events or self._dma.next_time <= self._events[0][0]:
                self._serve_dma()
                continue
            time, _, what = heappop(self._events)
            if isinstance(what, Meeting):
                for _, member in self._arrived.pop(id(what)):
                    self._start(member, time)
            else:
                self._wake(what, time)
        waiting = sum(t.done < 0 for t in self._timings)
        if waiting:
            raise RuntimeError(f"{waiting} steps wait for each other and can never start")
        return self._timings

    def _push(self, time: float, what: Stream | Meeting) -> None:
        self._tick += 1
        heappush(self._events, (time, self._tick, what))

    def _serve_dma(self) -> None:
        served = self._dma.serve()
        if served is not None:
            timing = self._timings[served.step]
            timing.transfer_start = served.start
            timing.done = served.end + self._c.dma_semaphore_ns
            self._release(served.step)

    def _release(self, producer: int) -> None:
        """A step's end is known: announce the consumers that waited for nothing else."""
        for step in self._consumers[producer]:
            self._missing[step.index] -= 1
            if not self._missing[step.index]:
                issuer = self._issuers[step.stream]
                if issuer.head is step:
                    self._announce(issuer, step)

    def _announce_head(self, issuer: _Issuer) -> None:
        head = issuer.head
        if head is not None and not self._missing[head.index]:
            self._announce(issuer, head)

    def _inputs(self, step: Step) -> tuple[float, Cause, int]:
        """When the inputs of a step are there, why then, and through which producer."""
        time, after = 0.0, -1
        cause: Cause = "start"
        engine = step.stream[1] if step.stream[1] in ("tensor", "vector") else "scalar"
        hop = self._c.hop_cycles / self._c.ghz(engine)
        is_dma = step.transfer is not None
        for producer, hazard in step.edges:
            before, timing = self._steps[producer], self._timings[producer]
            if before.transfer is not None:
                at = timing.done
            elif before.stream == step.stream and not is_dma:
                # In order on one engine: only a true dependence waits for the pipe.
                at = timing.done if hazard == "RAW" else timing.free
            else:
                at = (timing.free if hazard == "WAR" else timing.done) + hop
            if at > time:
                time, cause, after = at, hazard, producer
        return time, cause, after

    def _announce(self, issuer: _Issuer, step: Step) -> None:
        """The head of a stream, whose producers are all scheduled."""
        timing = self._timings[step.index]
        ready, timing.cause, timing.after = self._inputs(step)
        if step.meeting is not None:
            free = issuer.done if step.meeting.is_loop_edge else issuer.free
            if ready <= free and issuer.last >= 0:
                timing.cause, timing.after = "order", issuer.last
            self._arrive(step, step.meeting, max(ready, free))
        else:
            self._push(max(ready, issuer.free), step.stream)

    def _arrive(self, step: Step, meeting: Meeting, time: float) -> None:
        arrived = self._arrived[id(meeting)]
        arrived.append((time, step))
        if len(arrived) < len(meeting.members):
            return
        latest, last = max(arrived, key=lambda item: (item[0], item[1].index))
        for when, member in arrived:
            timing = self._timings[member.index]
            if when < latest:
                timing.cause, timing.after = "meeting", self._issuers[last.stream].last
        self._push(latest + meeting.extra_ns, meeting)

    def _wake(self, stream: Stream, time: float) -> None:
        """The time of a stream's head has come; what it shares may still be taken."""
        issuer = self._issuers[stream]
        step = issuer.order[issuer.position]
        wait = self._resources.earliest(step, time)
        if wait.cause is None:
            self._start(step, time)
            return
        timing = self._timings[step.index]
        timing.cause, timing.after = wait.cause, wait.after
        self._push(wait.start, stream)

    def _start(self, step: Step, time: float) -> None:
        issuer, timing = self._issuers[step.stream], self._timings[step.index]
        timing.stream_free = max(issuer.free, self._resources.array_free(step))
        if time <= timing.stream_free and timing.cause in ("RAW", "WAR", "WAW", "start"):
            timing.cause, timing.after = (
                ("order", issuer.last) if issuer.last >= 0 else ("start", -1)
            )
        busy, latency = step.occupancy.busy, step.occupancy.latency
        table = step.occupancy.table
        if table and table != issuer.table:
            issuer.table = table
            busy += self._c.act_table_load_ns
            latency += self._c.act_table_load_ns
        if step.stream[1] == "tensor" and step.meeting is None:
            if time - issuer.idle_since > self._c.tensor_ramp_ns / 2:
                issuer.slow_until = time + self._c.tensor_ramp_ns
            if time < issuer.slow_until:
                busy, latency = 2 * busy, latency + busy
            issuer.idle_since = max(issuer.idle_since, time + busy)
        timing.start, timing.free = time, time + busy
        issuer.last = step.index
        # Row tiles of the PE array run side by side: the array is a resource, not the stream.
        issuer.free = max(issuer.free, time if step.quadrants else timing.free)
        self._resources.take(step, timing.free)
        if step.transfer is not None and step.queue is not None:
            self._issue(step, timing)
        else:
            timing.done = time + latency
            issuer.done = max(issuer.done, timing.done)
        issuer.done = max(issuer.done, issuer.free)
        issuer.position += 1
        self._announce_head(issuer)
        if step.transfer is None:
            self._release(step.index)

    def _issue(self, step: Step, timing: Timing) -> None:
        """Hand a DMA to its queue, which takes one instruction per issue interval."""
        assert step.transfer is not None
        assert step.queue is not None
        at = timing.free if step.stream[1] == "gpsimd" else timing.start
        at = max(at, self._issue_free[step.queue])
        self._issue_free[step.queue] = at + self._c.dma_issue_ns
        first_byte = at + self._c.dma_first_byte_ns
        self._dma.submit(step.queue, step.index, step.transfer, first_byte)
