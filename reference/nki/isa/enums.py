"""Enumerations and small classes of `nki.isa`."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any

from ..nkiobject import NKIObject
from ..strict import violation


class engine(Enum):  # noqa: N801  # NKI's name
    """Engines of a NeuronCore."""

    # the plan caches hash members on every instruction; Enum's own hash is a Python function
    __hash__ = object.__hash__

    tensor = 1
    vector = 5
    scalar = 2
    gpsimd = 3
    dma = 4
    sync = 6
    unknown = 0


class reduce_cmd(Enum):  # noqa: N801  # NKI's name
    """What an instruction does with its engine's accumulator registers."""

    # the plan caches hash members on every instruction; Enum's own hash is a Python function
    __hash__ = object.__hash__

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):  # noqa: N801  # NKI's name
    """Who generates DMA descriptors."""

    # the plan caches hash members on every instruction; Enum's own hash is a Python function
    __hash__ = object.__hash__

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


def as_dge_mode(instruction: str, value: Any) -> Any:
    """Take the integers that 0.2.0 took, and that AWS's kernels still pass (rule "deprecated")."""
    if isinstance(value, dge_mode):
        return value
    if type(value) is int and value in [mode.value for mode in dge_mode]:
        mode = dge_mode(value)
        violation("deprecated", f"{instruction}: dge_mode {value} as an integer; use {mode}")
        return mode
    return value


class oob_mode(Enum):  # noqa: N801  # NKI's name
    """What a run-time index out of bounds does."""

    # the plan caches hash members on every instruction; Enum's own hash is a Python function
    __hash__ = object.__hash__

    error = 0
    skip = 1


class matmul_perf_mode(Enum):  # noqa: N801  # NKI's name
    """Performance mode of nc_matmul."""

    # the plan caches hash members on every instruction; Enum's own hash is a Python function
    __hash__ = object.__hash__

    none = "none"
    double_row = "double_row"


class nc_version(IntEnum):  # noqa: N801  # NKI's name
    """NeuronCore generation; ordered."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class dma_engine(Enum):  # noqa: N801  # NKI's name
    """Engine of sendrecv."""

    dma = 1
    gpsimd_dma = 2


class NkiInstruction(NKIObject):
    """Handle of an executed instruction; `handle` is its number in program order."""

    __slots__ = ("handle",)

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def depends_on(self, *producers: NkiInstruction) -> NkiInstruction:
        """Order this instruction after `producers`; program order holds here anyway."""
        for producer in producers:
            if not isinstance(producer, NkiInstruction):
                raise TypeError(f"depends_on: {producer!r} is no instruction handle")
        return self
