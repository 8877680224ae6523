"""Terminal summary of a modelled kernel launch: what bounds it, and where it waits."""

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from segattn.reference.nki.cost.constants import BANDS, LAUNCH_US, CostConstants, variant
from segattn.reference.nki.cost.needs import needs
from segattn.reference.nki.cost.result import CostResult, Evaluator, PathStep, Stall
from segattn.reference.nki.trace import Launch
from segattn.reference.terminal import columns, printable, table

LAUNCH = f"a launch costs {LAUNCH_US[0]} to {LAUNCH_US[1]} us more (measured by others)"

ENGINE_NAMES = {
    "tensor": "Tensor (PE)",
    "scalar": "Scalar (ACT)",
    "vector": "Vector (DVE)",
    "gpsimd": "GpSimd (Pool)",
    "dma": "DMA engines",
    "hbm": "HBM",
}


def _place(source: tuple[str, int] | None) -> str:
    if source is None:
        return ""
    path, line = source
    return f"{Path(path).name}:{line}"


def _engine_table(result: CostResult) -> str:
    counts: dict[tuple[int, str], int] = {}
    for step in result.plan.steps:
        key = (step.stream[0], "dma" if step.transfer is not None else step.stream[1])
        counts[key] = counts.get(key, 0) + (not step.record.opcode.startswith("loop "))
    heads = columns(">core", "engine", ">busy us", ">of modelled time", ">instructions")
    rows = [
        (
            core,
            ENGINE_NAMES[engine],
            f"{busy / 1e3:.1f}",
            f"{result.utilisation[core, engine]:.1%}",
            counts.get((core, engine), ""),
        )
        for (core, engine), busy in result.busy_ns.items()
    ]
    return table("Engines (modelled)", heads, rows)


def _stall_row(stall: Stall) -> list[str]:
    awaited = f"{stall.waits_for_opcode} {_place(stall.waits_for)}".strip()
    return [
        f"{stall.ns / 1e3:.1f}",
        str(stall.count),
        f"{stall.core} {stall.engine}",
        f"{stall.opcode} {_place(stall.source)}",
        stall.cause,
        awaited,
    ]


def _stall_table(result: CostResult, limit: int, wide: bool) -> str:
    heads = columns(">us", ">times", "engine", "statement that waits", "why", "+what it waits for")
    rows = [_stall_row(stall) for stall in result.stalls(limit)]
    return table("Longest stalls (modelled)", heads, rows, wide=wide)


def _path_line(result: CostResult) -> str:
    share: dict[str, float] = {}
    for step in result.critical_path:
        share[step.step.stream[1]] = share.get(step.step.stream[1], 0.0) + step.ns
    parts = sorted(share.items(), key=lambda item: -item[1])
    total = sum(share.values()) or 1.0
    return ", ".join(f"{name} {ns / total:.0%}" for name, ns in parts)


def path_table(result: CostResult, wide: bool = False) -> str:
    """The critical path, neighbouring steps of one statement together."""
    heads = columns(">from us", ">us", ">steps", "engine", "statement", "+why it started then")
    rows = []
    at = 0.0

    def statement(step: PathStep) -> tuple[str, str, str]:
        record = step.step.record
        return step.step.stream[1], f"{record.opcode} {_place(record.source)}", step.cause

    for (engine, text, cause), group in groupby(result.critical_path, statement):
        spans = [step.ns for step in group]
        cells = f"{at / 1e3:.1f}", f"{sum(spans) / 1e3:.2f}", str(len(spans))
        rows.append((*cells, engine, text, cause))
        at += sum(spans)
    return table("Critical path (modelled)", heads, rows, wide=wide)


def _bound(utilisation: float) -> str:
    """What an engine that is busy for this share of the time says about the launch."""
    if utilisation >= 0.5:
        return "bound by"
    return "bound by waiting (see the critical path and the stalls), not by its busiest engine,"


def summary(bands: Mapping[str, CostResult], stalls: int = 10, *, wide: bool = False) -> str:
    """Everything a reader needs first, as text; `bands` are the results by name."""
    result = bands["base"]
    core, engine = result.bounding_engine
    dma = result.dma
    counts = ", ".join(f"{name} {n}" for name, n in sorted(result.num_executed.items()))
    lines = [
        f"{printable(result.launch.kernel)}: modelled {result.modelled_us:.1f} us, "
        f"{_bound(result.utilisation[core, engine])} {ENGINE_NAMES[engine]} of core {core} "
        f"({result.utilisation[core, engine]:.0%} busy, roof {result.roof_ns / 1e3:.1f} us)",
        ", ".join(f"{name} {band.modelled_us:.1f} us" for name, band in bands.items())
        + f" (all modelled); {LAUNCH}",
        f"needs {needs(result)}",
        f"executed: {counts}",
        f"DMA: {dma.nbytes / 2**20:.2f} MiB in {dma.num_descriptors} descriptors, "
        f"efficiency {dma.efficiency:.0%}; HBM {dma.hbm_bytes / 2**20:.2f} MiB",
        f"critical path: {_path_line(result)}",
        _engine_table(result),
        _stall_table(result, stalls, wide),
    ]
    return "\n".join(lines)


def model_bands(launch: Launch, constants: CostConstants) -> dict[str, CostResult]:
    """A launch modelled in all bands; `constants` are the base."""
    evaluator = Evaluator(launch)
    return {name: evaluator.evaluate(variant(name, constants)) for name in BANDS}


def print_report(
    bands: Mapping[str, CostResult], stalls: int = 10, path: bool = False, *, wide: bool = False
) -> None:
    """Print `summary`, and the critical path if asked for."""
    print(summary(bands, stalls, wide=wide))
    if path:
        print(path_table(bands["base"], wide))
