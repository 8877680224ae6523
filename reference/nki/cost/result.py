"""Result of the cost model for one kernel launch. Every time in it is modelled, none measured."""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from ..records import Instruction, Launch, LoopMark
from .constants import BASE, CostConstants
from .dependencies import Edge, hazards
from .dma import NUM_ENGINES
from .plan import Plan, Step, plan
from .resources import Cause
from .simulate import Simulation, Timing

COMPUTE_ENGINES = ("tensor", "scalar", "vector", "gpsimd")


@dataclass(frozen=True)
class Stall:
    """Time that one engine waited before one statement, over all its executions."""

    core: int
    engine: str
    ns: float
    count: int
    source: tuple[str, int]
    """Statement that waited."""
    opcode: str
    cause: Cause
    waits_for: tuple[str, int] | None
    """Statement whose end it waited for, if it is one."""
    waits_for_opcode: str


@dataclass(frozen=True)
class PathStep:
    """A step of the critical path with the time from the previous step's start to its own."""

    step: Step
    ns: float
    cause: Cause


@dataclass(frozen=True)
class DmaUse:
    """What the DMA engines of a launch did, all cores together."""

    nbytes: int
    hbm_bytes: int
    num_instructions: int
    num_descriptors: int
    engine_ns: float
    """Busy time summed over engines."""
    efficiency: float
    """Payload per busy time, as a share of the documented rate of one engine."""


class CostResult:
    """Modelled timeline of one launch."""

    def __init__(
        self, launch: Launch, the_plan: Plan, timings: list[Timing], constants: CostConstants
    ) -> None:
        """Made by `evaluate`."""
        self.launch = launch
        self.plan = the_plan
        self.timings = timings
        self.constants = constants

    @cached_property
    def modelled_ns(self) -> float:
        """Modelled time of the launch, without what launching costs (`LAUNCH_US`)."""
        ends = (max(t.free, t.done) for t in self.timings)
        return max(ends, default=0.0)

    @property
    def modelled_us(self) -> float:
        """Modelled time of the launch in microseconds."""
        return self.modelled_ns / 1e3

    @cached_property
    def busy_ns(self) -> dict[tuple[int, str], float]:
        """Busy time of each compute engine, of the DMA engines (average of 16) and of HBM, by
        (core, "tensor" | "scalar" | "vector" | "gpsimd" | "dma" | "hbm").
        """
        busy: dict[tuple[int, str], float] = {}
        for core in range(self.launch.num_cores):
            for name in (*COMPUTE_ENGINES, "dma", "hbm"):
                busy[core, name] = 0.0
        for step, timing in zip(self.plan.steps, self.timings, strict=True):
            core, name = step.stream
            if step.transfer is not None:
                busy[core, "dma"] += float(step.transfer.engine_ns.sum()) / NUM_ENGINES
                busy[core, "hbm"] += step.transfer.hbm_bytes / self.constants.hbm_rate
            if name in COMPUTE_ENGINES and not isinstance(step.record, LoopMark):
                share = len(step.quadrants) / 16 if step.quadrants else 1.0
                busy[core, name] += (timing.free - timing.start) * share
        return busy

    @property
    def roof_ns(self) -> float:
        """Busy time of the busiest engine: no schedule of these instructions is faster."""
        return max(self.busy_ns.values(), default=0.0)

    @property
    def bounding_engine(self) -> tuple[int, str]:
        """(core, engine) with the most busy time."""
        return max(self.busy_ns, key=lambda key: self.busy_ns[key])

    @property
    def utilisation(self) -> dict[tuple[int, str], float]:
        """Busy time over modelled time, by (core, engine)."""
        total = self.modelled_ns or 1.0
        return {key: busy / total for key, busy in self.busy_ns.items()}

    def mfu(self, model_flops: float, ns: float | None = None) -> float:
        """Model FLOP utilisation (bf16 peak, of the cores used) at the modelled or a given time."""
        peak = self.constants.peak_flops_per_ns * self.launch.num_cores
        return model_flops / peak / (self.modelled_ns if ns is None else ns)

    def roofline_share(self, model_flops: float, model_bytes: float) -> float:
        """Share of the machine roof: the longer of FLOPs at peak and bytes at HBM rate, over the
        modelled time. FLOPs and bytes are those that the problem needs, not those executed.
        """
        cores = self.launch.num_cores
        compute = model_flops / (self.constants.peak_flops_per_ns * cores)
        memory = model_bytes / (self.constants.hbm_rate * cores)
        return max(compute, memory) / self.modelled_ns

    @cached_property
    def dma(self) -> DmaUse:
        """Totals of all DMA instructions."""
        moved = [step.transfer for step in self.plan.steps if step.transfer is not None]
        nbytes = sum(t.nbytes for t in moved)
        busy = sum(float(t.engine_ns.sum()) for t in moved)
        rate = self.constants.dma_documented_engine_rate
        return DmaUse(
            nbytes,
            sum(t.hbm_bytes for t in moved),
            len(moved),
            sum(t.num_descriptors for t in moved),
            busy,
            nbytes / rate / busy if busy else 0.0,
        )

    @property
    def num_executed(self) -> dict[str, int]:
        """Executed instructions per engine, "dma" included, all cores together."""
        counts: dict[str, int] = defaultdict(int)
        for record in self.launch.records:
            if isinstance(record, Instruction):
                counts[record.engine] += 1
        return dict(counts)

    def stalls(self, limit: int = 10) -> list[Stall]:
        """Longest waits of the compute engines, summed per waiting and awaited statement.

        Waiting at the edges of dynamic loops is not counted.
        """
        Key = tuple[int, str, tuple[str, int], str, Cause, tuple[str, int] | None, str]
        total: dict[Key, list[float]] = defaultdict(lambda: [0.0, 0])
        for step, timing in zip(self.plan.steps, self.timings, strict=True):
            core, engine = step.stream
            wait = timing.start - timing.stream_free
            if engine not in COMPUTE_ENGINES or wait <= 0 or isinstance(step.record, LoopMark):
                continue
            waits_for, opcode = None, ""
            if timing.after >= 0:
                producer = self.plan.steps[timing.after].record
                waits_for, opcode = producer.source, producer.opcode
            record = step.record
            key = (core, engine, record.source, record.opcode, timing.cause, waits_for, opcode)
            total[key][0] += wait
            total[key][1] += 1
        longest = sorted(total.items(), key=lambda item: -item[1][0])[:limit]
        return [
            Stall(k[0], k[1], ns, int(count), k[2], k[3], k[4], k[5], k[6])
            for k, (ns, count) in longest
        ]

    @cached_property
    def critical_path(self) -> list[PathStep]:
        """Chain of steps that ends last, first to last: each started because of the one before."""
        if not self.timings:
            return []
        ends = [max(t.free, t.done) for t in self.timings]
        index, path = ends.index(max(ends)), []
        later = ends[index]
        while index >= 0:
            timing = self.timings[index]
            path.append(PathStep(self.plan.steps[index], later - timing.start, timing.cause))
            later, index = timing.start, timing.after
        return path[::-1]


class Evaluator:
    """Models one launch under any number of constants; its hazards are found once."""

    def __init__(self, launch: Launch) -> None:
        """Nothing is compared yet."""
        self.launch = launch
        self._hazards: dict[tuple[bool, float], list[list[Edge]]] = {}

    def evaluate(self, constants: CostConstants = BASE) -> CostResult:
        """Modelled timeline under these constants."""
        key = constants.whole_tensors, constants.sbuf_bytes
        if key not in self._hazards:
            self._hazards[key] = hazards(self.launch.records, *key)
        the_plan = plan(self.launch, self._hazards[key], constants)
        timings = Simulation(the_plan, constants).run()
        return CostResult(self.launch, the_plan, timings, constants)


def evaluate(launch: Launch, constants: CostConstants = BASE) -> CostResult:
    """Model one launch of a trace once."""
    return Evaluator(launch).evaluate(constants)
