"""The running cores: current core, its memories, accumulator registers and instruction count."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .accumulator import Accumulator
from .dtypes import Array
from .errors import NkiValidationError, assigned_name, kernel_line
from .memory import Arena, BankAllocator, check_capacity
from .regions import PSUM, SBUF, MemoryRegion
from .rules.psum_operands import check_psum_tile
from .storage import Storage
from .view import Use

if TYPE_CHECKING:
    from .rules.regions import LoopRegion
    from .trips import Trips


class Core:
    """State of one physical NeuronCore during a launch."""

    def __init__(self, index: int, num_cores: int, has_grid: bool) -> None:
        self.index = index
        self.num_cores = num_cores
        self.has_grid = has_grid
        self.count = 0
        """Instructions executed."""
        self.arenas: dict[MemoryRegion, Arena] = {}
        self.banks = BankAllocator()
        self.hbm: list[tuple[int, int, str]] = []
        """First byte, end and name of the HBM tensors with an explicit address."""
        self.uses: dict[MemoryRegion, list[Use]] = {SBUF: [], PSUM: []}
        self.scalar_sum = Accumulator()
        self.vector_sum = Accumulator()
        self.constants: dict[object, Any] = {}
        """Tiles that one launch shares, e.g. identity matrices."""
        self.switch: Callable[[], None] | None = None
        """Hands over to the other core after an instruction."""
        self.in_no_reorder = False
        self.prepared: object | None = None
        """The collective that was prepared and waits for its trigger."""
        self.prepared_by: object | None = None
        """The handle of the instruction that prepared it."""
        self.trips: Trips | None = None
        """The innermost dynamic loop that runs."""
        self.region: LoopRegion | None = None
        """The same loop as the rules on device loops see it."""
        self.regions: list[LoopRegion] = []
        """All runs of device loops so far."""
        self.random = np.random.default_rng(0)
        self.random_state: Array | None = None

    def arena(self, region: MemoryRegion) -> Arena:
        """The memory in which tiles with an explicit address lie."""
        found = self.arenas.get(region)
        if found is None:
            found = self.arenas[region] = Arena(region)
            if region is PSUM:
                found.serial = self.banks.serial
        return found

    def new_tile(
        self, region: MemoryRegion, partitions: int, row_bytes: int, name: str, stored_bytes: int
    ) -> Storage:
        """An on-chip tile that the allocator may place anywhere, by default named as its variable.

        `row_bytes` per partition count for capacity, `stored_bytes` are kept (NKI_PRECISE_FP).
        """
        line = kernel_line()
        name = name or assigned_name(*line)
        storage = Storage(
            region,
            np.empty(partitions * stored_bytes, np.uint8),
            partitions * stored_bytes,
            name,
            stored_bytes,
            stored_bytes,
        )
        storage.use = Use(row_bytes, name, line)
        self.uses[region].append(storage.use)
        if region is PSUM:
            check_psum_tile(name, row_bytes)
            storage.first_byte = self.banks.place(storage)
            storage.serial = self.banks.serial
        return storage

    def new_hbm(self, region: MemoryRegion, nbytes: int, name: str, identity: object) -> Storage:
        """An HBM tensor; `identity` (shape, dtype) must agree between cores for shared_hbm."""
        name = name or assigned_name(*kernel_line())
        return Storage(region, np.empty(nbytes, np.uint8), nbytes, name=name)

    def finish(self) -> None:
        """Checks at the end of the kernel."""
        if self.prepared is not None:
            raise NkiValidationError(
                f"the kernel ends with a prepared collective ({self.prepared}) that was never "
                "triggered"
            )
        for region, uses in self.uses.items():
            check_capacity(region, uses)


class Run(threading.local):
    """Which core executes in this thread now; launches of several threads do not meet."""

    core: Core | None = None


RUN: Final = Run()


def current() -> Core:
    """The core that executes now. NkiValidationError outside a kernel."""
    core = RUN.core
    if core is None:
        raise NkiValidationError(
            "NKI instructions run inside a kernel only: decorate the function with nki.jit "
            "and call it, or pass it to nki.simulate"
        )
    return core
