"""One table of modelled launches: time, FLOPs, bytes, MFU and share of the roofline."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from segattn.reference.nki.cost.constants import BANDS
from segattn.reference.nki.cost.needs import needs
from segattn.reference.nki.cost.perfetto import perfetto_trace
from segattn.reference.nki.cost.result import CostResult
from segattn.reference.nki.records import Matmul
from segattn.reference.outputs import OutputFile
from segattn.reference.terminal import columns, table


def save_timeline(result: CostResult, path: Path) -> None:
    """Write the timeline of a launch for Perfetto."""
    OutputFile(path).save(json.dumps(perfetto_trace(result)))


def launch_rows(every: Sequence[Mapping[str, CostResult]]) -> list[dict[str, Any]]:
    """Plain values of each launch, given its results by band; all times are modelled.

    flops, hbm_bytes: what ran, see `matmul_flops`. mfu: share of the bf16 peak of the cores used.
    roofline: share of the modelled time that those FLOPs at peak or those bytes at the HBM rate,
    whichever takes longer, would need.
    """
    rows = []
    for bands in every:
        result = bands["base"]
        cores = result.launch.num_cores
        flops, nbytes = matmul_flops(result), result.dma.hbm_bytes
        core, engine = result.bounding_engine
        busy = {f"core {c} {name}": ns / 1e3 for (c, name), ns in result.busy_ns.items()}
        rows.append(
            {
                "kernel": result.launch.kernel,
                "num_cores": cores,
                "us": {name: band.modelled_us for name, band in bands.items()},
                "flops": flops,
                "hbm_bytes": nbytes,
                "mfu": result.mfu(flops),
                "roofline": result.roofline_share(flops, nbytes),
                "needs": asdict(needs(result)),
                "bound_by": f"core {core} {engine}",
                "busy_us": busy,
            }
        )
    return rows


def matmul_flops(result: CostResult) -> int:
    """2 K M N of every matmul that a launch executed; transposes on the Tensor Engine do not count.

    In the double-row modes both operands hold two rows of K side by side.
    """
    records = (step.record for step in result.plan.steps)
    return sum(
        2 * r.K * r.M * r.N // (2 if r.perf_mode.startswith("double_row") else 1)
        for r in records
        if isinstance(r, Matmul) and not r.is_transpose
    )


def launch_table(rows: Sequence[dict[str, Any]], wide: bool) -> str:
    """The rows as text."""
    heads = columns("kernel", "+>cores")
    heads += columns(*(f">{band} us" for band in BANDS))
    heads += columns(">MFU", ">roofline", "bound by", "+>MFLOP", "+>HBM KiB")
    heads += columns("+>SBUF KiB", "+>PSUM banks", "+>instructions")
    engines = list(dict.fromkeys(name for row in rows for name in row["busy_us"]))
    heads += columns(*(f"+>{name} us" for name in engines))
    cells = [
        [
            row["kernel"],
            row["num_cores"],
            *(f"{row['us'][band]:.1f}" for band in BANDS),
            f"{row['mfu']:.1%}",
            f"{row['roofline']:.1%}",
            row["bound_by"],
            f"{row['flops'] / 1e6:.1f}",
            f"{row['hbm_bytes'] / 1024:.0f}",
            f"{row['needs']['sbuf_bytes'] / 1024:.0f}",
            row["needs"]["psum_banks"],
            row["needs"]["num_instructions"],
            *(f"{row['busy_us'].get(name, 0.0):.1f}" for name in engines),
        ]
        for row in rows
    ]
    return table("Launches (modelled, not measured)", heads, cells, wide=wide)
