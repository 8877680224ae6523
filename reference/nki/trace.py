"""Instruction trace: the recorder that the interpreter's instruction functions append to.

They add one light record per executed instruction while a `Trace` is active; everything else is
derived later by the cost model.

    with Trace() as trace:
        kernel(q, k, v)
    trace.launches[0].records

Inside the interpreter:

    if (recorder := trace.active) is not None:
        recorder.compute("vector", "tensor_scalar", core, (dst.access,), (data.access,), op="add")
"""

from types import TracebackType
from typing import Self

from .errors import kernel_place
from .records import (
    WHOLE_ARRAY,
    Access,
    Dma,
    Engine,
    Instruction,
    Launch,
    LoopEdge,
    LoopMark,
    Matmul,
    Record,
)

__all__ = [
    "Access",
    "Dma",
    "Engine",
    "Instruction",
    "Launch",
    "LoopEdge",
    "LoopMark",
    "Matmul",
    "Record",
    "Trace",
    "active",
]


class Trace:
    """Recorder; active between `__enter__` and `__exit__`. One at a time in a process.

    Both cores of an LNC2 launch append to the same trace.
    """

    def __init__(self) -> None:
        """Start empty and inactive."""
        self.launches: list[Launch] = []
        self._records: list[Record] = []
        self._iteration: dict[int, tuple[int, ...]] = {}

    def __enter__(self) -> Self:
        """Activate. RuntimeError if another trace is active: records would be lost."""
        global active
        if active is not None:
            raise RuntimeError("a Trace is already active; leave it before entering another")
        active = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Deactivate."""
        global active
        active = None

    def launch(self, kernel: str, num_cores: int = 1) -> None:
        """Open the record list of a kernel launch."""
        opened = Launch(kernel, num_cores)
        self.launches.append(opened)
        self._records = opened.records
        self._iteration = dict.fromkeys(range(num_cores), ())

    def compute(
        self,
        engine: Engine,
        opcode: str,
        core: int,
        writes: tuple[Access, ...],
        reads: tuple[Access, ...],
        op: str = "",
    ) -> None:
        """An instruction of a compute engine, or one that moves a register."""
        code, line = kernel_place()
        self._records.append(
            Instruction(engine, opcode, core, writes, reads, op, self._iteration[core], code, line)
        )

    def matmul(
        self,
        core: int,
        dst: Access,
        stationary: Access,
        moving: Access,
        perf_mode: str = "none",
        is_transpose: bool = False,
        tile_position: tuple[int, int] = (0, 0),
        tile_size: tuple[int, int] = WHOLE_ARRAY,
    ) -> None:
        """An `nc_matmul`. `nc_transpose` on the Tensor Engine goes through `compute`."""
        code, line = kernel_place()
        self._records.append(
            Matmul(
                "tensor",
                "nc_matmul",
                core,
                (dst,),
                (stationary, moving),
                "",
                self._iteration[core],
                code,
                line,
                perf_mode,
                is_transpose,
                tile_position,
                tile_size,
            )
        )

    def dma(
        self,
        opcode: str,
        core: int,
        writes: tuple[Access, ...],
        reads: tuple[Access, ...],
        trigger: str = "",
        dge_mode: str = "unknown",
        transpose: bool = False,
        skipped_rows: int = 0,
    ) -> None:
        """A DMA instruction."""
        code, line = kernel_place()
        self._records.append(
            Dma(
                "dma",
                opcode,
                core,
                writes,
                reads,
                "",
                self._iteration[core],
                code,
                line,
                trigger,
                dge_mode,
                transpose,
                skipped_rows,
            )
        )

    def loop(self, edge: LoopEdge, core: int, reads: tuple[Access, ...] = ()) -> None:
        """Edge of a dynamic loop: "begin", then "iteration" before each trip, then "end"."""
        code, line = kernel_place()
        iteration = self._iteration[core]
        if edge == "begin":
            iteration = (*iteration, -1)
        elif edge == "iteration":
            iteration = (*iteration[:-1], iteration[-1] + 1)
        else:
            iteration = iteration[:-1]
        self._iteration[core] = iteration
        self._records.append(LoopMark(edge, core, reads, iteration, code, line))


active: Trace | None = None
"""The trace that records now, or None."""
