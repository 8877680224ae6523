"""What engines share on chip: PSUM banks, the SBUF port of fast modes, the quadrants of the PE."""

from collections import defaultdict
from typing import Literal, NamedTuple

from .plan import Step

Cause = Literal["start", "order", "RAW", "WAR", "WAW", "room", "bank", "port", "meeting"]
"""Why a step started when it did: nothing before it, its stream, a hazard, SBUF that another tile
held, a shared resource, or a meeting of several streams."""


class Wait(NamedTuple):
    """Earliest start, and what it waits for if that is later than asked."""

    start: float
    cause: Cause | None
    after: int
    """Step that holds the resource; -1 for none."""


class _Use(NamedTuple):
    read_until: float
    write_until: float
    step: int


class Resources:
    """Who holds what until when, in ns. Ask and take in order of time."""

    def __init__(self) -> None:
        """Everything is free."""
        self._banks: dict[tuple[int, int], dict[str, _Use]] = defaultdict(dict)
        self._ports: dict[int, dict[str, tuple[float, int]]] = defaultdict(dict)
        self._quadrants: dict[tuple[int, int], tuple[float, int]] = {}

    def array_free(self, step: Step) -> float:
        """When the part of the PE array that a matmul uses is free; 0 for other steps."""
        core = step.stream[0]
        return max(
            (self._quadrants.get((core, q), (0.0, -1))[0] for q in step.quadrants), default=0.0
        )

    def earliest(self, step: Step, start: float) -> Wait:
        """Earliest start at or after `start`."""
        core, engine = step.stream
        wait = Wait(start, None, -1)
        for quadrant in step.quadrants:
            until, user = self._quadrants.get((core, quadrant), (0.0, -1))
            if until > wait.start:
                wait = Wait(until, "order", user)
        for banks, reads in ((step.reads_banks, True), (step.writes_banks, False)):
            for bank in banks:
                for other, use in self._banks[bank].items():
                    if other == engine:
                        continue
                    # One reading and one writing engine at a time; ACT and DVE never together.
                    until = use.read_until if reads else use.write_until
                    if "tensor" not in (other, engine):
                        until = max(use.read_until, use.write_until)
                    if until > wait.start:
                        wait = Wait(until, "bank", use.step)
        if step.occupancy.shares_port:
            for other, (until, user) in self._ports[core].items():
                if other != engine and until > wait.start:
                    wait = Wait(until, "port", user)
        return wait

    def take(self, step: Step, until: float) -> None:
        """Hold the resources of a step until then."""
        core, engine = step.stream
        for quadrant in step.quadrants:
            self._quadrants[core, quadrant] = (until, step.index)
        nobody = _Use(0.0, 0.0, -1)
        for bank in step.reads_banks:
            use = self._banks[bank].get(engine, nobody)
            self._banks[bank][engine] = _Use(until, use.write_until, step.index)
        for bank in step.writes_banks:
            use = self._banks[bank].get(engine, nobody)
            self._banks[bank][engine] = _Use(use.read_until, until, step.index)
        if step.occupancy.shares_port:
            self._ports[core][engine] = (until, step.index)
