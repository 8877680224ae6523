"""Device loops of a launch: which runs now, and what both cores of a pair must have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import kernel_line
from ..serial import new_serial
from ..strict import violation

if TYPE_CHECKING:
    from ..core import Core


class LoopRegion:
    """One run of a device loop: where it is, what surrounds it, how many trips it has made."""

    __slots__ = ("born", "depth", "line", "name", "outer", "trips")

    def __init__(self, name: str, outer: LoopRegion | None) -> None:
        self.name = name
        self.outer = outer
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.line = kernel_line()
        self.born = new_serial()
        self.trips = 0

    def same_as(self, other: LoopRegion) -> bool:
        """Whether both are runs of one loop of the program, or one lies in the other."""
        if other is self or other is self.outer or other.outer is self:
            return True
        return self.outer is not None and self.line == other.line

    def __str__(self) -> str:
        return f"{self.name} of line {self.line[1]} ({self.trips} trips)"


def enter_region(core: Core, name: str) -> LoopRegion:
    """A device loop begins: rule "nested_loops"."""
    region = LoopRegion(name, core.region)
    core.regions.append(region)
    if region.outer is not None:
        violation(
            "nested_loops",
            f"{name} inside {region.outer.name} of line {region.outer.line[1]}; unroll one of them "
            "with range, or make one loop over the product of their trips",
        )
    return region


def check_lnc_loops(cores: Sequence[Core]) -> None:
    """Rule "lnc_loops": the cores of a pair run the same nest of loops, equally often."""
    first, second = (core.regions for core in cores)
    for number, (a, b) in enumerate(zip(first, second, strict=False)):
        if (a.depth, a.name, a.trips) != (b.depth, b.name, b.trips):
            what = "kind" if a.name != b.name else "trip counts"
            what = what if a.depth == b.depth else "nesting"
            violation(
                "lnc_loops",
                f"device loop number {number} differs in its {what}: core 0 runs {a}, core 1 runs "
                f"{b}; give both cores one common count, and let surplus trips work on nothing",
                at=a.line,
            )
            return
    if len(first) != len(second):
        more = 0 if len(first) > len(second) else 1
        extra = (first if more == 0 else second)[min(len(first), len(second))]
        violation(
            "lnc_loops",
            f"core {more} runs {len(cores[more].regions)} device loops, core {1 - more} "
            f"{len(cores[1 - more].regions)}: {extra} has no counterpart; let both cores run the "
            "same loops, one without work with 0 or with surplus trips",
            at=extra.line,
        )
