"""Pictures from a results file, never from memory.

roofline.png: model FLOP/s of every row against its arithmetic intensity; prior.png: modelled time
against the prior length; timeline.png: what each engine does in a Perfetto file of one launch.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from segattn.reference.extras import MissingExtraError
from segattn.reference.json_files import FormatError, read_object, required
from segattn.reference.nki.cost.constants import BASE
from segattn.reference.outputs import output_folder

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise MissingExtraError("matplotlib", "plot") from error

TERA = 1e3
"""FLOP per ns in a TFLOP per s."""

MARKERS = ("o", "s", "^", "D")
"""Of the points, a new one when the ten colours have been used."""


def _finish(figure: Figure, axes: Axes, path: Path, title: str) -> None:
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def roofline(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Attained TFLOP/s of one core against FLOPs per byte of the problem, with both roofs."""
    figure, axes = plt.subplots(figsize=(9, 6))
    peak, rate = BASE.peak_flops_per_ns / TERA, BASE.hbm_rate / TERA
    intensity = sorted([2.0**k for k in range(15)] + [peak / rate])
    axes.plot(intensity, [min(peak, i * rate) for i in intensity], color="black")
    axes.axvline(peak / rate, color="grey", linewidth=0.5)
    for number, row in enumerate(row for row in rows if row["model_flops"]):
        x = row["model_flops"] / row["model_bytes"]
        y = row["model_flops"] / (row["us"]["base"] * 1e3) / TERA
        axes.plot(x, y, MARKERS[number // 10 % len(MARKERS)], markersize=6, label=row["label"])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs of the problem per byte that must cross HBM")
    axes.set_ylabel("TFLOP/s of one core (modelled)")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    _finish(figure, axes, path, "Roofline of one trn2 core, bf16; points modelled, base constants")


def time_against_prior(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Modelled time against the prior length, one line per chunk length and heads."""
    figure, axes = plt.subplots(figsize=(8, 5))
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        lengths, _, heads = row["label"].partition(", ")
        if "/" in lengths and "(" not in lengths:
            chunk, prior = (int(n) for n in lengths.split("/"))
            lines.setdefault(f"S={chunk}, {heads}", []).append((prior, row["us"]["base"]))
    for name, points in sorted(lines.items()):
        points.sort()
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
    axes.set_xscale("symlog", base=2, linthresh=256)
    axes.set_yscale("log")
    axes.set_xlabel("prior tokens")
    axes.set_ylabel("us (modelled)")
    axes.legend(fontsize=7)
    _finish(figure, axes, path, "Time of one call, one core, modelled with base constants")


def engine_timeline(perfetto: dict[str, Any], path: Path) -> None:
    """Busy spans of each engine and queue of a Perfetto file."""
    events = perfetto["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    figure, axes = plt.subplots(figsize=(12, 0.4 * len(names) + 1))
    for height, track in enumerate(sorted(names, reverse=True)):
        spans = [
            (e["ts"], e["dur"]) for e in events if e["ph"] == "X" and track == (e["pid"], e["tid"])
        ]
        axes.broken_barh(spans, (height - 0.4, 0.8), color=f"C{height % 10}")
    axes.set_yticks(range(len(names)))
    axes.set_yticklabels(
        [f"core {core} {names[core, t]}" for core, t in sorted(names, reverse=True)]
    )
    axes.set_xlabel("us (modelled)")
    _finish(figure, axes, path, f"{perfetto['otherData']['kernel']}: engine timeline, modelled")


def add_arguments(parser: ArgumentParser) -> None:
    """The results, and where pictures go."""
    parser.add_argument("results", type=Path, help="file of `segattn bench kernels --out`")
    parser.add_argument(
        "--timeline", type=Path, help="a file of `segattn bench kernels --perfetto`"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("plots"), help="for the pictures (plots)"
    )


def run(options: Namespace) -> int:
    """Draw the pictures and print their names."""
    results = read_object(options.results)
    rows = required(results, "rows", str(options.results))
    timeline = read_object(options.timeline) if options.timeline else None
    folder = output_folder(options.folder)
    try:
        paths = [folder / "roofline.png", folder / "prior.png"]
        roofline(rows, paths[0])
        time_against_prior([*rows, *results.get("sweep", [])], paths[1])
        if timeline is not None:
            paths.append(folder / "timeline.png")
            engine_timeline(timeline, paths[2])
    except (KeyError, TypeError, ValueError) as error:
        files = f"{options.results}" + (f" or {options.timeline}" if timeline else "")
        raise FormatError(f"{files}: not what `segattn bench kernels` writes: {error!r}") from error
    names = [str(path) for path in paths]
    print(json.dumps(names) if options.json else "\n".join(names))
    return 0
