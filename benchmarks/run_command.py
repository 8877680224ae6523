"""Model NKI kernels of your own files, or compile and time them on a device.

A kernel runs on the interpreter, its instruction trace goes through the cost model. Printed are
modelled time in three bands, FLOPs, bytes, MFU, share of the roofline, SBUF and PSUM that the
modelled schedule needs; several kernels and several sets of arguments give one table.
`--backend device` compiles every launch, times it (after warm-up) and keeps its NEFF.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from segattn.benchmarks.device.calls import (
    ITERATIONS,
    DeviceError,
    add_device_options,
    compile_and_run,
    measure,
    require_device,
    save_call,
)
from segattn.benchmarks.kernels.cost_report import print_report
from segattn.benchmarks.launch_summary import launch_table, save_timeline
from segattn.benchmarks.user_kernel import (
    array_of,
    bound_arguments,
    load_object,
    model_call,
    relative_error,
    user_error,
)
from segattn.reference import nki
from segattn.reference.nki.cost.constants import BASE, CostConstants
from segattn.reference.outputs import OutputFile, output_folder
from segattn.reference.terminal import columns, one_line, phase, table


def add_arguments(parser: ArgumentParser) -> None:
    """Kernels, their arguments, what to do with them."""
    parser.add_argument("kernels", nargs="+", metavar="FILE.py::kernel")
    parser.add_argument(
        "--args",
        metavar="FILE.py::function",
        help="a function that returns the arguments: a dict or tuple, or a list of several",
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="NAME=SIZE,SIZE:DTYPE",
        help="a random array instead, one for each tensor argument",
    )
    parser.add_argument(
        "--value",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="an argument that is no tensor, beside --shape",
    )
    parser.add_argument(
        "--check", metavar="FILE.py::function", help="NumPy function of the same arguments"
    )
    parser.add_argument(
        "--tolerance", type=float, default=1e-2, help="relative error allowed by --check (0.01)"
    )
    parser.add_argument("--lnc", type=int, choices=(1, 2), default=1, help="cores (1)")
    parser.add_argument("--backend", choices=("interpreter", "device"), default="interpreter")
    parser.add_argument("--constants", type=Path, help="microbenchmark results to model with")
    parser.add_argument("--stalls", type=int, default=0, help="print this many stalls per launch")
    parser.add_argument("--perfetto", type=Path, help="folder for one timeline per launch")
    parser.add_argument("--out", type=Path, help="write the JSON here, row by row")
    parser.add_argument("--wide", action="store_true", help="all columns of the table")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="device: timed runs")
    add_device_options(parser, Path("user_calls"))


def run(options: Namespace) -> int:
    """Print one table; 1 when a kernel failed or differs from the --check function."""
    for name, least in (("stalls", 0), ("iterations", 1)):
        if getattr(options, name) < least:
            options.parser.error(f"--{name}={getattr(options, name)}: must be at least {least}")
    if not 0 <= options.tolerance < float("inf"):
        options.parser.error(f"--tolerance={options.tolerance}: must be a number of at least 0")
    out = OutputFile(options.out) if options.out else None
    if options.perfetto:
        output_folder(options.perfetto)
    if options.backend == "device":
        require_device()
        # This process models on the interpreter; children compile with AWS's nki.
        for name in [name for name in sys.modules if name.partition(".")[0] == "nki"]:
            del sys.modules[name]
    constants = CostConstants.from_results(options.constants) if options.constants else BASE
    nki.install()
    calls = [(place, *call) for place in options.kernels for call in _calls(place, options)]
    check = load_object(options.check) if options.check else None
    rows: list[dict[str, Any]] = []
    with phase("kernels", len(calls)) as advance:
        for number, (place, kernel, arguments) in enumerate(calls):
            rows += _rows(number, place, kernel, arguments, check, constants, options)
            if out:
                out.save_json(rows)
            advance(1)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        _print(rows, options.wide)
    return int(any(row["failed"] for row in rows))


def _calls(place: str, options: Namespace) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The kernel of a place with each set of its arguments."""
    kernel = load_object(place)
    if options.args:
        if options.shape or options.value:
            raise ValueError("give --args, or --shape and --value, not both")
        make = load_object(options.args)
        try:
            given = make()
        except Exception as error:
            raise user_error(Path(options.args.partition("::")[0]).resolve(), error) from error
        for one in given if isinstance(given, list) else [given]:
            yield kernel, bound_arguments(kernel, one, options.args)
        return
    rng = np.random.default_rng(0)
    given = dict(array_of(text, rng) for text in options.shape)
    for text in options.value:
        name, _, value = text.partition("=")
        try:
            given[name] = json.loads(value)
        except ValueError as error:
            raise ValueError(f"--value {text}: must be NAME=JSON ({error})") from error
    yield kernel, bound_arguments(kernel, given, f"{place} with --shape and --value")


def _rows(
    number: int,
    place: str,
    kernel: Any,
    arguments: dict[str, Any],
    check: Any,
    constants: CostConstants,
    options: Namespace,
) -> list[dict[str, Any]]:
    """Rows of the launches of one call, or the one that says how it failed."""
    shapes = " ".join(
        f"{name}{list(value.shape)}" for name, value in arguments.items() if hasattr(value, "shape")
    )
    head = {"place": place, "arguments": shapes, "failed": False}
    before = _copies(arguments)
    launched = kernel[options.lnc] if hasattr(kernel, "num_cores") else kernel
    try:
        call = model_call(launched, arguments, constants)
        error = None
        if check is not None:
            expected = check(
                **{n: v.copy() if hasattr(v, "copy") else v for n, v in before.items()}
            )
            expected = expected if isinstance(expected, tuple) else (expected,)
            error = max(map(relative_error, call.outputs, expected))
            head |= {"relative_error": error, "failed": not error <= options.tolerance}
        if options.backend == "device":
            head |= _measured(number, place, before, call.outputs, options)
    except Exception as problem:  # a kernel of the user's: the others are worth modelling
        failure = user_error(Path(place.partition("::")[0]).resolve(), problem)
        print(f"error: {one_line(failure)}", file=sys.stderr)
        return [head | {"failed": True, "error": str(failure)}]
    for launch, bands in enumerate(call.launches):
        if options.stalls and not options.json:
            print_report(bands, options.stalls, wide=options.wide)
        if options.perfetto:
            name = f"{number:03}_{launch}_{bands['base'].launch.kernel}.json"
            save_timeline(bands["base"], options.perfetto / name)
    return [head | row for row in call.rows]


def _copies(arguments: dict[str, Any]) -> dict[str, Any]:
    return {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in arguments.items()}


def _measured(
    number: int, place: str, arguments: dict[str, Any], expected: Any, options: Namespace
) -> dict[str, Any]:
    """Times of one call on the device, and how far its results are from the interpreter's."""
    folder = options.calls / f"{number:03}_{place.rpartition('::')[2]}"
    file, _, name = place.partition("::")
    save_call(folder, f"{Path(file).resolve()}::{name}", arguments, options.lnc)
    try:
        outputs = compile_and_run(folder, options.lnc)
        timing = measure(folder, options.nrtpy_python, options.iterations)
    except DeviceError as error:
        return {"failed": True, "error": str(error)}
    differences = [relative_error(outputs[str(i)], np.asarray(e)) for i, e in enumerate(expected)]
    return {
        "measured_p50_us": timing.p50_us,
        "measured_p99_us": timing.p99_us,
        "device_error": max(differences),
        "failed": not max(differences) <= options.tolerance,
    }


def _print(rows: list[dict[str, Any]], wide: bool) -> None:
    modelled = [row for row in rows if "us" in row]
    if modelled:
        print(launch_table(modelled, wide))
    extra = [row for row in rows if {"relative_error", "measured_p50_us", "error"} & row.keys()]
    if extra:
        heads = columns("kernel", "+arguments", ">error", ">p50 us", ">p99 us", "result")
        cells = [
            [
                row["place"].rpartition("::")[2],
                row["arguments"],
                *(
                    f"{row[name]:.3g}" if name in row else ""
                    for name in ("relative_error", "measured_p50_us", "measured_p99_us")
                ),
                row.get("error") or ("WRONG" if row["failed"] else "ok"),
            ]
            for row in extra
        ]
        print(table("Checked, and measured where a device was", heads, cells, wide=wide))
