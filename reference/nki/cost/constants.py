"""Constants of the cost model: one physical NeuronCore-v3 of a Trainium2.

Each field says where its value comes from: D documented by AWS, F fitted to a published profile,
A assumed. A results file of the device microbenchmarks replaces single fields by measured ones.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

CLOCK_ENGINES = ("tensor", "scalar", "vector", "gpsimd", "sync")
DIVISORS = ("_ghz", "_rate", "_share", "_queues", "dma_transpose_hbm", "dma_transpose_sbuf")
"""How the names of constants end that something is divided by."""


@dataclass(frozen=True)
class CostConstants:
    """Rates and overheads. Times in ns, cycles in cycles of the named engine, rates in B/ns."""

    tensor_ghz: float = 2.4
    """D (architecture guide of Trainium2), as the other three clocks."""
    scalar_ghz: float = 1.2
    vector_ghz: float = 0.96
    gpsimd_ghz: float = 1.2
    sync_ghz: float = 1.2
    """A: as the other sequencers."""

    tensor_min_cycles: float = 64
    """D: least interval between two matmuls."""
    tensor_overhead_cycles: float = 0
    """A: cycles that a matmul adds to its moving columns; 0 = the stationary load is hidden."""
    tensor_pipe_cycles: float = 64
    """A: from the last column streamed to the result in PSUM."""
    fp32_matmul_passes: float = 4
    """D, and the utilisation of the published fp32 profile (F)."""
    fp32_transpose_passes: float = 2
    """D: twice as fast as an fp32 matmul."""

    scalar_overhead_cycles: float = 64
    """D as least interval; that an independent activation costs N + 64 and not N + 224 is A."""
    scalar_latency_ns: float = 290
    """F: an isolated exp of 128 columns takes 0.40 us."""
    accumulator_read_cycles: float = 64
    """D: reading a reduction register out after the instruction."""
    act_table_load_ns: float = 1280
    """F: change of the activation function table."""

    vector_overhead_cycles: float = 64
    """F: 5120 instructions of 512 columns in 2.99 ms; D as least interval."""
    vector_latency_cycles: float = 100
    """D: what a dependent instruction waits beyond the columns."""

    gpsimd_overhead_cycles: float = 150
    """D: start of a GpSimd instruction."""
    gpsimd_pipe_cycles: float = 150
    """A."""

    hop_cycles: float = 60
    """A: semaphore to another engine, in cycles of the engine that waits."""
    dynamic_address_cycles: float = 600
    """D: least time of an on-chip instruction whose address comes from a register."""
    register_ns: float = 100
    """A: register load, store or move on a sequencer."""

    dma_issue_ns: float = 600
    """D for the hardware DGE, F for the software DGE: one DMA instruction per queue."""
    dma_first_byte_ns: float = 740
    """F: from issue to the first byte."""
    dma_semaphore_ns: float = 300
    """F: from the last byte to the start of a waiting instruction."""
    dma_descriptor_ns: float = 9.0
    """F: fixed time of a descriptor on one of the 16 engines."""
    dma_engine_rate: float = 24.5
    """F: bytes per ns of one engine, without the fixed time."""
    dma_documented_engine_rate: float = 23.0
    """D: achieved rate of one engine; base of the transpose efficiencies."""
    dma_transpose_hbm: float = 0.9
    """D, "up to": HBM to SBUF, as a share of the time of the same descriptors without transpose."""
    dma_transpose_sbuf: float = 0.36
    """F: SBUF to SBUF, as a share of the documented rate; the documents say up to 0.5."""
    dma_compute_share: float = 0.5
    """D: rate of an accumulating DMA relative to a copy."""
    gather_pool_cycles: float = 150
    """A: GpSimd prepares an indirect DMA, plus `gather_descriptor_cycles` for each descriptor."""
    gather_descriptor_cycles: float = 1
    """A."""
    default_queues: int = 2
    """A: queues per direction over which DMAs without a named issuer are spread in turn."""
    hbm_rate: float = 358.0
    """D/F: HBM bytes per ns of one core."""

    loop_iteration_ns: float = 2000
    """A: trip of a dynamic loop on every engine that it uses."""
    loop_barrier: bool = True
    """A: engines meet at the edges of a dynamic loop; DMA in flight goes on."""
    core_barrier_ns: float = 1000
    """A: barrier between the two cores of an LNC2 pair."""
    launch_ns: float = 0
    """Not modelled: time outside the kernel."""

    derate: float = 1.4
    """F: how far the measured attention_cte is from its documented engine roof."""
    optimism: float = 1.05
    """A: schedule slack over the engine roof at best."""

    def ghz(self, engine: str) -> float:
        """Clock of a compute engine, in cycles per ns."""
        if engine not in CLOCK_ENGINES:
            raise ValueError(f"engine {engine!r} has no clock; allowed: {CLOCK_ENGINES}")
        value: float = getattr(self, f"{engine}_ghz")
        return value

    @property
    def peak_flops_per_ns(self) -> float:
        """bf16 multiply-adds of the 128 x 128 array, counted as 2 FLOP each."""
        return 128 * 128 * 2 * self.tensor_ghz

    def with_measured(self, values: Mapping[str, object]) -> Self:
        """Copy with some fields replaced. ValueError names a field that does not exist."""
        known = {f.name for f in fields(self)}
        measured: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"constant {name!r} is unknown; allowed: {sorted(known)}")
            if isinstance(getattr(self, name), bool):
                if not isinstance(value, bool):
                    raise ValueError(f"constant {name!r} is {value!r}; allowed: true, false")
            elif (
                not isinstance(value, int | float)
                or isinstance(value, bool)
                or not 0 <= value < float("inf")
            ):
                raise ValueError(f"constant {name!r} is {value!r}; allowed: a finite number >= 0")
            elif value == 0 and name.endswith(DIVISORS):
                raise ValueError(f"constant {name!r} is 0; allowed: a number above 0")
            measured[name] = value
        return replace(self, **measured)

    @classmethod
    def from_results(cls, path: Path) -> Self:
        """Base constants with those of a microbenchmark results file (its key "constants").

        OSError if it cannot be read, ValueError naming the file if it is none.
        """
        try:
            results = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: no results file, since it is no JSON: {error}") from error
        values = results.get("constants") if isinstance(results, dict) else None
        if not isinstance(values, dict):
            raise ValueError(
                f'{path}: no results file, which has an object "constants"; '
                "`segattn bench microbenchmarks --out` writes one"
            )
        try:
            return cls().with_measured(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


BASE = CostConstants()

SENSITIVITY: dict[str, dict[str, float]] = {
    "act224": {"scalar_overhead_cycles": 224},
    "issue860": {"dma_issue_ns": 860},
    "loop0": {"loop_iteration_ns": 0},
    "loop4": {"loop_iteration_ns": 4000},
    "pe16": {"tensor_overhead_cycles": 16},
    "tp50": {"dma_transpose_sbuf": 0.5},
    "pessimistic": {
        "scalar_overhead_cycles": 224,
        "dma_issue_ns": 860,
        "loop_iteration_ns": 4000,
    },
}
"""What changes from the base in each column of a sensitivity table."""


def variant(name: str, base: CostConstants = BASE) -> CostConstants:
    """`base` with the changes of one sensitivity column, or `base` itself for "base"."""
    if name == "base":
        return base
    if name not in SENSITIVITY:
        raise ValueError(f"variant is {name!r}; allowed: base, {', '.join(SENSITIVITY)}")
    return base.with_measured(SENSITIVITY[name])
