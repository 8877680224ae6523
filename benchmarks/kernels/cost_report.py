"""Terminal summary of a modelled kernel launch: what bounds it, and where it waits."""

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from segattn.benchmarks.whole_tables import print_whole
from segattn.reference.extras import MissingExtraError
from segattn.reference.nki.cost.constants import BANDS, LAUNCH_US, CostConstants, variant
from segattn.reference.nki.cost.needs import needs
from segattn.reference.nki.cost.result import CostResult, Evaluator, PathStep, Stall
from segattn.reference.nki.trace import Launch

try:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table
except ImportError as error:
    raise MissingExtraError("rich", "cli") from error

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


def _engine_table(result: CostResult) -> Table:
    table = Table(title="Engines (modelled)", title_justify="left")
    table.add_column("core", justify="right")
    table.add_column("engine")
    for column in ("busy us", "of modelled time", "instructions"):
        table.add_column(column, justify="right")
    counts: dict[tuple[int, str], int] = {}
    for step in result.plan.steps:
        key = (step.stream[0], "dma" if step.transfer is not None else step.stream[1])
        counts[key] = counts.get(key, 0) + (not step.record.opcode.startswith("loop "))
    bound = result.bounding_engine
    for (core, engine), busy in result.busy_ns.items():
        cells = [
            str(core),
            ENGINE_NAMES[engine],
            f"{busy / 1e3:.1f}",
            f"{result.utilisation[core, engine]:.1%}",
            str(counts.get((core, engine), "")),
        ]
        table.add_row(*cells, style="bold" if (core, engine) == bound else None)
    return table


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


def _stall_table(result: CostResult, limit: int) -> Table:
    table = Table(title="Longest stalls (modelled)", title_justify="left")
    for column in ("us", "times", "engine", "statement that waits", "why", "what it waits for"):
        table.add_column(column, justify="right" if column in ("us", "times") else "left")
    for stall in result.stalls(limit):
        table.add_row(*_stall_row(stall))
    return table


def _path_line(result: CostResult) -> str:
    share: dict[str, float] = {}
    for step in result.critical_path:
        share[step.step.stream[1]] = share.get(step.step.stream[1], 0.0) + step.ns
    parts = sorted(share.items(), key=lambda item: -item[1])
    total = sum(share.values()) or 1.0
    return ", ".join(f"{name} {ns / total:.0%}" for name, ns in parts)


def path_table(result: CostResult) -> Table:
    """The critical path, neighbouring steps of one statement together."""
    table = Table(title="Critical path (modelled)", title_justify="left")
    for column in ("from us", "us", "steps", "engine", "statement", "why it started then"):
        table.add_column(column, justify="right" if column.endswith(("us", "steps")) else "left")
    at = 0.0

    def statement(step: PathStep) -> tuple[str, str, str]:
        record = step.step.record
        return step.step.stream[1], f"{record.opcode} {_place(record.source)}", step.cause

    for (engine, text, cause), group in groupby(result.critical_path, statement):
        spans = [step.ns for step in group]
        cells = f"{at / 1e3:.1f}", f"{sum(spans) / 1e3:.2f}", str(len(spans))
        table.add_row(*cells, engine, text, cause)
        at += sum(spans)
    return table


def _bound(utilisation: float) -> str:
    """What an engine that is busy for this share of the time says about the launch."""
    if utilisation >= 0.5:
        return "bound by"
    return "bound by waiting (see the critical path and the stalls), not by its busiest engine,"


def summary(
    result: CostResult, stalls: int = 10, bands: Mapping[str, float] | None = None
) -> RenderableType:
    """Everything a reader needs first, as a rich renderable; `bands` are modelled us by name."""
    core, engine = result.bounding_engine
    dma = result.dma
    counts = ", ".join(f"{name} {n}" for name, n in sorted(result.num_executed.items()))
    shown = bands or {"base": result.modelled_us}
    lines = [
        f"[bold]{result.launch.kernel}[/bold]: modelled {result.modelled_us:.1f} us, "
        f"{_bound(result.utilisation[core, engine])} {ENGINE_NAMES[engine]} of core {core} "
        f"({result.utilisation[core, engine]:.0%} busy, roof {result.roof_ns / 1e3:.1f} us)",
        ", ".join(f"{name} {us:.1f} us" for name, us in shown.items())
        + f" (all modelled); {LAUNCH}",
        f"needs {needs(result)}",
        f"executed: {counts}",
        f"DMA: {dma.nbytes / 2**20:.2f} MiB in {dma.num_descriptors} descriptors, "
        f"efficiency {dma.efficiency:.0%}; HBM {dma.hbm_bytes / 2**20:.2f} MiB",
        f"critical path: {_path_line(result)}",
    ]
    return Group("\n".join(lines), _engine_table(result), _stall_table(result, stalls))


def report(
    launch: Launch, constants: CostConstants, stalls: int = 10, path: bool = False
) -> CostResult:
    """Model a launch in all bands and print `summary`, and the critical path if asked for.

    The result is that of `constants`, the base.
    """
    evaluator = Evaluator(launch)
    results = {name: evaluator.evaluate(variant(name, constants)) for name in BANDS}
    base = results["base"]
    console = Console()
    bands = {name: result.modelled_us for name, result in results.items()}
    print_whole(console, summary(base, stalls, bands))
    if path:
        print_whole(console, path_table(base))
    return base
