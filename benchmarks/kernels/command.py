"""Modelled times of the kernels, or measured ones on a device.

Without a device every number in the table is modelled: the kernels run on the interpreter, their
instruction trace goes through the cost model. `best` is what the documents promise, `base` our best
estimate, `field` what others measured on devices; launching costs more (see the last line).
"""

import contextlib
import json
import platform
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from segattn import __version__
from segattn.benchmarks.device.calls import ITERATIONS, add_device_options
from segattn.benchmarks.device.compile_gate import run_compiled
from segattn.benchmarks.device.kernels import run_measured
from segattn.benchmarks.kernels.cost_report import LAUNCH, model_bands, print_report
from segattn.benchmarks.kernels.documented import documented_lines
from segattn.benchmarks.kernels.modelled import (
    COLUMNS,
    Functions,
    Modelled,
    model,
    public_functions,
    record,
)
from segattn.benchmarks.kernels.outline import outline_call
from segattn.benchmarks.kernels.own_shapes import add_shape_options, own_targets
from segattn.benchmarks.kernels.targets import (
    EXACT_LIMIT,
    EXACT_ROWS,
    PADDED,
    PADDING_LIMIT,
    SWEEP,
    TARGETS,
    Target,
)
from segattn.benchmarks.kernels.workloads import Prefill
from segattn.benchmarks.launch_summary import save_timeline
from segattn.reference.nki.cost.constants import BANDS, BASE, SENSITIVITY, CostConstants
from segattn.reference.outputs import OutputFile, output_folder
from segattn.reference.terminal import columns, table

BACKENDS = ("interpreter", "compile", "device")
"""Modelled times, AWS's compiler without a device, measured times."""


def _selected(only: str) -> list[Target]:
    chosen = [t for t in TARGETS if only in f"{t.workload.kernel} {t.workload.label}"]
    if not chosen:
        labels = ", ".join(t.workload.label for t in TARGETS)
        raise ValueError(
            f"--only is {only!r}; it must occur in a kernel name or in one of: {labels}"
        )
    return chosen


def _chosen(arguments: Namespace) -> list[Target]:
    """Rows of shapes of one's own, or those of the targets."""
    return own_targets(arguments) or _selected(arguments.only)


def targets_table(rows: Sequence[tuple[Target, Modelled]], wide: bool = False) -> str:
    """Modelled times of the bands, the share of the base beside its target, and the needs."""
    heads = columns("S/prior, heads x head_dim", *(f">{column}" for column in COLUMNS))
    heads += columns(">share", ">target", "", "bound by", "+>SBUF KiB", "+>banks")
    heads += columns("+>loops", "+>program")
    cells = []
    for target, modelled in rows:
        needs = modelled.needs
        cells.append(
            (
                modelled.label,
                *(f"{modelled.us[column]:.1f}" for column in COLUMNS),
                f"{target.reached(modelled):.1%}",
                target.text,
                "" if target.holds(modelled) else "MISS",
                modelled.bound_by,
                f"{needs.sbuf_bytes / 1024:.0f}",
                *(needs.psum_banks, needs.num_loops, needs.num_instructions),
            )
        )
    title = "Modelled us, and share of the bf16 peak (decode, write: of the HBM rate) at base"
    return table(title, heads, cells, wide=wide)


def sensitivity_table(rows: Sequence[Modelled]) -> str:
    """Modelled time with one measured range at a time, a column each."""
    names = ("base", *SENSITIVITY)
    cells = [(m.label, *(f"{m.us[name]:.1f}" for name in names)) for m in rows]
    heads = columns("base with", *(f">{name}" for name in names))
    return table("Modelled us, one assumption changed", heads, cells, wide=True)


def with_whole_program(
    modelled: Modelled, target: Target, functions: Functions, options: dict[str, int]
) -> Modelled:
    """With program length and loops of all fallbacks, which the trace does not have."""
    work = target.workload
    arguments = work.arguments(np.random.default_rng(0))
    found = outline_call(functions[work.kernel], **arguments, **options)
    program = {"num_instructions": found.num_instructions, "num_loops": found.num_loops}
    return replace(modelled, needs=replace(modelled.needs, **program))


def padding_ratio(base: CostConstants) -> float:
    """Modelled time of the padded workload of `targets.PADDED` over that of the fitting one."""
    functions = public_functions()
    padded, fitting = (
        model(work, record(work, functions), ("base",), base)[0].us["base"] for work in PADDED
    )
    return padded / fitting


def exact_ratio(workload: Prefill, auto_us: float | None, base: CostConstants) -> float:
    """Modelled time of softmax="exact" over that of "auto" (None: not yet known)."""
    functions = public_functions()
    if auto_us is None:
        auto_us = model(workload, record(workload, functions), ("base",), base)[0].us["base"]
    launches = record(workload, functions, softmax="exact")
    return model(workload, launches, ("base",), base)[0].us["base"] / auto_us


def legend(constants: CostConstants = BASE) -> str:
    """What the columns of the table are, and which constants are not the base ones."""
    changes = "; ".join(
        f"{name}: {', '.join(f'{field} = {value:g}' for field, value in changed.items())}"
        for name, changed in BANDS.items()
        if changed
    )
    return (
        f"All numbers are modelled, none measured; {LAUNCH}. {changes}. Share and what follows "
        "belong to base, a target in us to field. SBUF, banks: the fullest moment of the "
        "timeline; loops, program: device loops and instructions after unrolling of one core, with "
        "every fallback. MISS: short of "
        "its target." + measured_constants(constants)
    )


def measured_constants(constants: CostConstants) -> str:
    """The constants that are not those of the base."""
    changed = [
        f"{field.name} = {getattr(constants, field.name):g} (base {getattr(BASE, field.name):g})"
        for field in fields(constants)
        if getattr(constants, field.name) != getattr(BASE, field.name)
    ]
    return f" Constants from the results file: {', '.join(changed)}." if changed else ""


def run_modelled(arguments: Namespace) -> int:
    """Model the selected workloads and print the table; 1 if a target is missed."""
    constants = CostConstants.from_results(arguments.constants) if arguments.constants else BASE
    out = OutputFile(arguments.out) if arguments.out else None
    text = sys.stderr if arguments.json else sys.stdout
    functions = public_functions()
    rows: list[tuple[Target, Modelled]] = []
    for target in _chosen(arguments):
        begin = time.perf_counter()
        two_cores = {} if target.workload.kernel == "write_kv_cache" else {"lnc": arguments.lnc}
        launches = record(target.workload, functions, **two_cores)
        interpreted = time.perf_counter() - begin
        shown = (*COLUMNS, *SENSITIVITY) if arguments.sensitivity else COLUMNS
        modelled, results = model(target.workload, launches, shown, constants)
        modelled = with_whole_program(modelled, target, functions, two_cores)
        rows.append((target, modelled))
        if out:
            out.save_json(results_file(rows))
        aim = f" (target {target.text})" if target.text else ""
        print(
            f"{modelled.label}: modelled {modelled.us['base']:.1f} us, "
            f"{f'{target.reached(modelled):.1%}'}{aim}; {LAUNCH}; "
            f"interpreted in {interpreted:.1f} s",
            file=text,
        )
        if arguments.stalls or arguments.path:
            with contextlib.redirect_stdout(text):
                for launch in launches:
                    bands = model_bands(launch, constants)
                    print_report(bands, arguments.stalls, arguments.path, wide=arguments.wide)
        if arguments.perfetto:
            output_folder(arguments.perfetto)
            for number, result in enumerate(results):
                name = modelled.label.translate(str.maketrans("/ ,()", "_____"))
                save_timeline(result, arguments.perfetto / f"{name}_{number}.json")
    print(targets_table(rows, arguments.wide), file=text)
    print(legend(constants), file=text)
    if arguments.sensitivity:
        print(sensitivity_table([modelled for _, modelled in rows]), file=text)
    written = results_file(rows)
    if arguments.sweep:
        written["sweep"] = sweep(functions, constants)
    if out:
        out.save_json(written)
    if arguments.json:
        print(json.dumps(written, indent=1))
    met = all(target.holds(modelled) for target, modelled in rows)
    if arguments.exact or arguments.documented:
        known = {target.workload: modelled.us["base"] for target, modelled in rows}
        others = [work for work in EXACT_ROWS if arguments.only in work.label]
        for work in (*known, *others):
            if isinstance(work, Prefill):
                ratio = exact_ratio(work, known.get(work), constants)
                met = met and ratio <= EXACT_LIMIT
                print(
                    f"{work.label}: exact over auto {ratio:.2f} (limit {EXACT_LIMIT}), modelled",
                    file=text,
                )
    if arguments.documented:
        for line in documented_lines(functions, constants, arguments.only):
            print(line, file=text)
    if arguments.padding or arguments.documented:
        ratio = padding_ratio(constants)
        met = met and ratio <= PADDING_LIMIT
        print(
            f"{PADDED[0].label} over {PADDED[1].label}: {ratio:.2f} (limit {PADDING_LIMIT}), "
            "modelled",
            file=text,
        )
    return 0 if met else 1


def sweep(functions: Functions, base: CostConstants) -> list[dict[str, Any]]:
    """Labels and modelled times of the rows of `targets.SWEEP`."""
    rows = []
    for work in SWEEP:
        modelled, _ = model(work, record(work, functions), ("base",), base)
        rows.append({"label": modelled.label, "us": modelled.us})
        print(f"{modelled.label}: modelled {modelled.us['base']:.1f} us", file=sys.stderr)
    return rows


def results_file(rows: Sequence[tuple[Target, Modelled]]) -> dict[str, Any]:
    """What `--json` writes, and what the plots are made from."""
    return {
        "kind": "modelled",
        "segattn": __version__,
        "python": platform.python_version(),
        "rows": [{**modelled.as_json(), **target.as_json()} for target, modelled in rows],
    }


def add_arguments(made: ArgumentParser) -> None:
    """Options of `segattn bench kernels`."""
    made.add_argument(
        "--backend", choices=("interpreter", "compile", "device"), default="interpreter"
    )
    made.add_argument(
        "--lnc", type=int, choices=(1, 2), default=1, help="cores that share the attention"
    )
    made.add_argument("--only", default="", help="rows whose kernel or label contains this text")
    made.add_argument("--stalls", type=int, default=0, help="print this many stalls per launch")
    made.add_argument("--path", action="store_true", help="print the critical path per launch")
    made.add_argument(
        "--sensitivity", action="store_true", help="also one measured range at a time"
    )
    made.add_argument("--out", type=Path, help="write the results here, as they come")
    made.add_argument(
        "--sweep", action="store_true", help="more prior lengths for the picture of --json"
    )
    made.add_argument("--perfetto", type=Path, help="folder for one timeline per launch")
    made.add_argument("--wide", action="store_true", help="all columns of the tables")
    add_shape_options(made)
    add_device_options(made, Path("kernel_calls"))
    made.add_argument("--iterations", type=int, default=ITERATIONS, help="device: timed runs")
    made.add_argument("--profile", action="store_true", help="device: neuron-explorer as well")
    made.add_argument(
        "--padding", action="store_true", help="also compare a padded with a fitting bucket"
    )
    made.add_argument(
        "--documented", action="store_true", help="every modelled number of docs/kernels.md"
    )
    made.add_argument(
        "--exact", action="store_true", help="also compare softmax='exact' with 'auto'"
    )
    made.add_argument(
        "--constants", type=Path, help="results of `segattn bench microbenchmarks` to model with"
    )


def run(arguments: Namespace) -> int:
    """0 all targets met, 1 some missed."""
    if arguments.stalls < 0:
        arguments.parser.error(f"--stalls={arguments.stalls}: must be at least 0")
    if arguments.backend == "device":
        return run_measured(_chosen(arguments), arguments)
    if arguments.backend == "compile":
        return run_compiled(_chosen(arguments), arguments)
    return run_modelled(arguments)
