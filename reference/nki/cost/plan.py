"""From records to steps: where each one queues, what it costs and which meeting it attends.

A *stream* is what issues in order: a compute engine or the sync engine. A *meeting* is a set of
steps of several streams that start together: the edge of a dynamic loop, a core barrier, the two
sides of a sendrecv.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..records import WHOLE_ARRAY, Access, Dma, Instruction, Launch, LoopMark, Matmul, Record
from .constants import CostConstants
from .dependencies import Edge
from .dma import Transfer, transfer
from .occupancy import Occupancy, occupancy

PSUM_BANK_BYTES = 2048
_MEETING_OPCODES = ("core_barrier", "sendrecv")
_ENGINE_OF_SWDGE = "gpsimd"

Stream = tuple[int, str]
"""(core, engine), or (core, queue of an engine)."""


@dataclass(slots=True, eq=False)
class Meeting:
    """Steps that start together, after the last of them has arrived."""

    members: list["Step"] = field(default_factory=list)
    extra_ns: float = 0.0
    """From the last arrival to the common start."""
    is_loop_edge: bool = False


@dataclass(slots=True, eq=False)
class Step:
    """One record on one stream."""

    index: int
    """Position among the steps of the plan."""
    stream: Stream
    record: Record
    occupancy: Occupancy
    edges: Sequence[Edge] = ()
    transfer: Transfer | None = None
    queue: Stream | None = None
    """Queue that a DMA goes through; its stream only issues it."""
    meeting: Meeting | None = None
    quadrants: tuple[int, ...] = ()
    """Blocks of 32 x 32 of the PE array that a matmul keeps busy; empty in a launch whose matmuls
    all take the whole array."""
    reads_banks: tuple[tuple[int, int], ...] = ()
    writes_banks: tuple[tuple[int, int], ...] = ()
    """(storage, PSUM bank) touched."""


@dataclass(slots=True)
class Plan:
    """All steps of a launch in program order, and those of each stream."""

    steps: list[Step]
    streams: dict[Stream, list[Step]]
    step_of: dict[int, int]
    """Step of each instruction by its position in the launch."""


_QUADRANTS = 4
_ALL_QUADRANTS = tuple(range(_QUADRANTS * _QUADRANTS))
_NO_TIME = Occupancy(0.0, 0.0)


def _quadrants(record: Instruction) -> tuple[int, ...]:
    if not isinstance(record, Matmul):
        return _ALL_QUADRANTS
    (row, col), (rows, cols) = record.tile_position, record.tile_size
    return tuple(
        r * _QUADRANTS + c
        for r in range(row // 32, -(-(row + rows) // 32))
        for c in range(col // 32, -(-(col + cols) // 32))
    )


def _banks(access: Access) -> tuple[tuple[int, int], ...]:
    span = sum((n - 1) * s for n, s in access.free_dims) + access.itemsize
    last = (access.offset + span - 1) // PSUM_BANK_BYTES
    first = access.offset // PSUM_BANK_BYTES
    return tuple((access.storage, bank) for bank in range(first, last + 1))


class _Queues:
    """Chooses stream and queue of each DMA."""

    def __init__(self, constants: CostConstants) -> None:
        self._constants = constants
        self._turn: dict[Stream, int] = defaultdict(int)

    def assign(self, record: Dma) -> tuple[Stream, Stream]:
        """(issuing stream, queue)."""
        core = record.core
        indirect = any(a.indirect for a in (*record.writes, *record.reads))
        if record.trigger:
            mode = "swdge" if record.trigger == _ENGINE_OF_SWDGE else "hwdge"
            return (core, record.trigger), (core, f"{record.trigger}.{mode}")
        if indirect or record.dge_mode == "swdge":
            return (core, _ENGINE_OF_SWDGE), (core, f"{_ENGINE_OF_SWDGE}.swdge")
        # The two engines that drive a hardware DGE (documented); published profiles show that
        # stores, which wait for results, do not hold back loads.
        issuer = "scalar" if record.writes[0].buffer == "hbm" else "sync"
        turn = self._turn[core, issuer]
        self._turn[core, issuer] = (turn + 1) % self._constants.default_queues
        return (core, issuer), (core, f"{issuer}.{turn}")


def _signature(record: Instruction) -> tuple[object, ...]:
    """What the cost of an instruction depends on, as far as its operands go."""
    operands = record.writes + record.reads
    shapes = [(a.buffer, a.dtype, a.shape, a.strides, a.indirect) for a in operands]
    return (len(record.writes), *shapes)


class _Builder:
    """Adds the steps of a launch one record at a time."""

    def __init__(self, constants: CostConstants, tiled: bool) -> None:
        self.constants = constants
        self.tiled = tiled
        self.steps: list[Step] = []
        self._meetings: dict[tuple[str, int], Meeting] = {}
        self._num_meetings: dict[tuple[str, int], int] = defaultdict(int)
        self._trips: dict[int, list[int]] = defaultdict(list)
        """Trips so far of the open loops of each core."""
        self._in_flight: dict[int, list[int]] = defaultdict(list)
        """DMA steps of each core since its last loop edge."""
        self._occupancy: dict[object, Occupancy] = {}
        self._transfer: dict[object, Transfer] = {}
        self._banks: dict[Access, tuple[tuple[int, int], ...]] = {}

    def _banks_of(self, accesses: Iterable[Access]) -> tuple[tuple[int, int], ...]:
        found: tuple[tuple[int, int], ...] = ()
        for access in accesses:
            if access.buffer == "psum":
                banks = self._banks.get(access)
                if banks is None:
                    banks = self._banks[access] = _banks(access)
                found += banks
        return found

    def _occupancy_of(self, record: Instruction) -> Occupancy:
        mode = (record.perf_mode, record.is_transpose) if isinstance(record, Matmul) else ()
        key = (record.engine, record.opcode, record.op, mode, _signature(record))
        found = self._occupancy.get(key)
        if found is None:
            found = self._occupancy[key] = occupancy(record, self.constants)
        return found

    def _transfer_of(self, record: Dma) -> Transfer:
        partitions = [a.partition for a in (*record.writes, *record.reads)]
        extra = (record.opcode, record.transpose, record.skipped_rows)
        key = (extra, *partitions, _signature(record))
        found = self._transfer.get(key)
        if found is None:
            found = self._transfer[key] = transfer(record, self.constants)
        return found

    def add(self, step: Step) -> None:
        step.index = len(self.steps)
        self.steps.append(step)

    def instruction(
        self, record: Instruction, stream: Stream, queue: Stream | None, edges: list[Edge]
    ) -> None:
        """Append the step of a compute instruction or of a DMA, with its meeting if it has one."""
        c = self.constants
        if isinstance(record, Dma):
            payload = self._transfer_of(record)
            slot = _issue(record, stream, payload, c)
            step = Step(-1, stream, record, slot, edges, payload, queue)
            self._in_flight[record.core].append(len(self.steps))
        else:
            step = Step(-1, stream, record, self._occupancy_of(record), edges)
            step.reads_banks = self._banks_of(record.reads)
            step.writes_banks = self._banks_of(record.writes)
            if self.tiled and record.engine == "tensor":
                step.quadrants = _quadrants(record)
        if record.opcode in _MEETING_OPCODES:
            # The n-th of one core meets the n-th of the other.
            number = self._num_meetings[record.opcode, record.core]
            self._num_meetings[record.opcode, record.core] = number + 1
            meeting = self._meetings.setdefault((record.opcode, number), Meeting())
            if record.opcode == "core_barrier":
                meeting.extra_ns = c.core_barrier_ns
            meeting.members.append(step)
            step.meeting = meeting
        self.add(step)

    def check_meetings(self, num_cores: int) -> None:
        """ValueError if a core waits at a meeting that the other one never reaches."""
        for (opcode, number), meeting in self._meetings.items():
            if len(meeting.members) < num_cores:
                core = meeting.members[0].stream[0]
                raise ValueError(f"{opcode} number {number} is reached by core {core} only")

    def loop_mark(self, mark: LoopMark, streams: Iterable[Stream], edges: list[Edge]) -> None:
        """Append one step per engine of the core: all of them meet at every edge of a loop."""
        trips = self._trips[mark.core]
        if mark.edge == "begin":
            trips.append(0)
        elif mark.edge == "iteration":
            trips[-1] += 1
        # A loop without a trip costs as much as one: its bound is looked at all the same.
        pays = mark.edge == "iteration" or (mark.edge == "end" and not trips.pop())
        meeting = Meeting([], self.constants.loop_iteration_ns if pays else 0.0, True)
        if not self.constants.dma_crosses_loops:
            edges = edges + [Edge(step, "RAW") for step in self._in_flight.pop(mark.core, ())]
        for stream in streams:
            meeting.members.append(Step(-1, stream, mark, _NO_TIME, edges, meeting=meeting))
            self.add(meeting.members[-1])


def _issue(record: Dma, stream: Stream, payload: Transfer, c: CostConstants) -> Occupancy:
    """What issuing a DMA costs the stream that issues it."""
    busy = c.dma_issue_ns
    if stream[1] == "scalar":
        # Hidden behind the engine's other work (documented): only the instruction slot.
        busy = c.scalar_overhead_cycles / c.scalar_ghz
    elif stream[1] == "gpsimd":
        indirect = any(a.indirect for a in (*record.writes, *record.reads))
        each = c.gather_descriptor_cycles if indirect else c.swdge_descriptor_cycles
        busy = (c.gather_pool_cycles + each * payload.num_descriptors) / c.gpsimd_ghz
    return Occupancy(busy, busy)


def plan(launch: Launch, edges: Sequence[list[Edge]], constants: CostConstants) -> Plan:
    """Steps of a launch; `edges` are the `hazards` of its records."""
    records = launch.records
    tiled = any(isinstance(r, Matmul) and r.tile_size != WHOLE_ARRAY for r in records)
    builder = _Builder(constants, tiled)
    queues = _Queues(constants)
    issue: list[tuple[Stream, Stream | None]] = []
    engines: dict[int, dict[Stream, None]] = defaultdict(dict)
    for record in records:
        if isinstance(record, Dma):
            issue.append(queues.assign(record))
        else:
            engine = record.engine if isinstance(record, Instruction) else ""
            issue.append(((record.core, engine), None))
        if isinstance(record, Instruction):
            engines[record.core][issue[-1][0]] = None
    step_of: dict[int, int] = {}
    for position, record in enumerate(records):
        own = [Edge(step_of[e.producer], e.hazard) for e in edges[position]]
        if isinstance(record, Instruction):
            step_of[position] = len(builder.steps)
            builder.instruction(record, *issue[position], own)
        else:
            builder.loop_mark(record, engines[record.core], own)
    builder.check_meetings(launch.num_cores)
    streams: dict[Stream, list[Step]] = defaultdict(list)
    for step in builder.steps:
        streams[step.stream].append(step)
    return Plan(builder.steps, dict(streams), step_of)
