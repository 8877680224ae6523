"""Constants of the cost model: one physical NeuronCore-v3 of a Trainium2, in three bands.

*best* is what the documents promise, *base* our best estimate, *field* what others measured on
devices. Each field says where its base value comes from: D documented by AWS, F fitted to a
published profile, M measured by a third party (docs/cost_model.md names them), A assumed. A
results file of the device microbenchmarks replaces single fields by measured ones.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from ..regions import SBUF_USABLE_BYTES

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
    tensor_ramp_ns: float = 3000
    """D: how long the Tensor Engine runs at half speed after it was idle for half as long."""
    tensor_pipe_cycles: float = 64
    """A: from the last column streamed to the result in PSUM."""
    fp32_matmul_passes: float = 4
    """D, and the utilisation of the published fp32 profile (F)."""
    fp32_transpose_passes: float = 2
    """D: twice as fast as an fp32 matmul."""

    min_cycles: float = 64
    """D: least interval between two instructions of the Scalar or Vector Engine."""
    scalar_overhead_cycles: float = 64
    """M: an exp costs N + 76 to N + 91 cycles besides the reduction register, a copy N + 20."""
    scalar_latency_ns: float = 290
    """F: an isolated exp of 128 columns takes 0.40 us."""
    accumulator_read_cycles: float = 64
    """D: reading a reduction register out after the instruction."""
    act_table_load_ns: float = 1280
    """F: change of the activation function table."""

    vector_overhead_cycles: float = 64
    """F: 5120 instructions of 512 columns in 2.99 ms."""
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
    """A: GpSimd prepares a DMA of the software DGE, plus cycles for each descriptor."""
    swdge_descriptor_cycles: float = 1
    """F: 600 ns for a copy of 128 descriptors, 1190 ns from the trigger to its end."""
    gather_descriptor_cycles: float = 6
    """M: 5 to 15 ns for each descriptor of an indirect DMA."""
    default_queues: int = 2
    """A: queues of one issuer over which its DMAs are spread in turn."""
    hbm_rate: float = 358.0
    """D/F: HBM bytes per ns of one core."""

    loop_iteration_ns: float = 9000
    """D (design notes of AWS's dynamic attention kernel): a trip of a dynamic loop, at whose edges
    all engines meet. A loop that makes no trip costs the same."""
    dma_crosses_loops: bool = True
    """A: DMA in flight goes on over the edge of a dynamic loop."""
    whole_tensors: bool = False
    """A: operands on chip are ordered by the bytes that they touch, not by tensor."""
    sbuf_bytes: float = SBUF_USABLE_BYTES
    """D: SBUF per partition; a tile without an address waits until there is room for it."""
    core_barrier_ns: float = 1000
    """A: barrier between the two cores of an LNC2 pair."""

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

LAUNCH_US = (130, 210)
"""M: what a launch costs besides the kernel, which no modelled time contains: a graph that does
nothing takes 130 us, a kernel in a graph about 210 us above its own work."""

BANDS: dict[str, dict[str, float]] = {
    "best": {
        "scalar_overhead_cycles": 0,
        "vector_overhead_cycles": 0,
        "tensor_ramp_ns": 0,
        "dma_transpose_sbuf": 0.5,
        "gather_descriptor_cycles": 1,
        "loop_iteration_ns": 4000,
    },
    "base": {},
    "field": {
        "tensor_ghz": 2.1,
        "fp32_matmul_passes": 5.2,
        "fp32_transpose_passes": 5.2,
        "gather_descriptor_cycles": 18,
        "loop_iteration_ns": 9500,
        "dma_crosses_loops": False,
    },
}
"""What changes from the base in each band of modelled times."""

SENSITIVITY: dict[str, dict[str, float]] = {
    "whole tensors": {"whole_tensors": True},
    "no DMA over loop edges": {"dma_crosses_loops": False},
    "loop trip 1.4 us": {"loop_iteration_ns": 1400},
    "loop trip 30 us": {"loop_iteration_ns": 30000},
    "descriptor 1 ns": {"gather_descriptor_cycles": 1},
    "descriptor 15 ns": {"gather_descriptor_cycles": 18},
    "PE 2.1 GHz": {"tensor_ghz": 2.1},
    "PE 1.79 GHz": {"tensor_ghz": 1.79},
    "fp32 5.2 passes": {"fp32_matmul_passes": 5.2, "fp32_transpose_passes": 5.2},
    "gap 25 ns": {"scalar_overhead_cycles": 30, "vector_overhead_cycles": 24},
    "gap 239 ns": {"scalar_overhead_cycles": 287, "vector_overhead_cycles": 229},
    "DMA issue 860 ns": {"dma_issue_ns": 860},
    "DMA engine 17 GB/s": {"dma_engine_rate": 17},
    "DMA transpose 50 %": {"dma_transpose_sbuf": 0.5},
}
"""One measured range at a time: what changes from the base in each row of a sensitivity table."""


def variant(name: str, base: CostConstants = BASE) -> CostConstants:
    """`base` with the changes of a band or of a row of the sensitivity table.

    Constants of `base` that were measured on a device, and so are not those of `BASE`, stay.
    ValueError for another name.
    """
    changes = BANDS.get(name, SENSITIVITY.get(name))
    if changes is None:
        raise ValueError(f"variant is {name!r}; allowed: {', '.join((*BANDS, *SENSITIVITY))}")
    assumed = {n: v for n, v in changes.items() if getattr(base, n) == getattr(BASE, n)}
    return base.with_measured(assumed)
