"""What kernels of the pinned commits use of NKI 0.6 and 0.7 removed: `nl.dynamic_range`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from segattn.reference import nki
from segattn.reference.nki.loops import DynamicLoop
from segattn.reference.nki.registers import VirtualRegister, integer


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """A loop of the device as a Python `for`, which the parser of 0.6 read."""
    if stop is None:
        start, stop = 0, start
    counts = range(integer("start", start), integer("stop", stop), step)
    with DynamicLoop("nl.dynamic_range", start, stop) as loop:
        for i in counts:
            loop.next_trip(dynamic_range)  # there is no body to go back to
            yield VirtualRegister(i, frozen=True)


@contextmanager
def old_names() -> Iterator[None]:
    """Let `nl` have them for the duration of a `with` block."""
    names = vars(nki.language)
    names["dynamic_range"] = dynamic_range
    try:
        yield
    finally:
        del names["dynamic_range"]
