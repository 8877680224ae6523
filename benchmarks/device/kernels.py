"""The device side of `segattn bench kernels`: compile, check, time, keep the NEFF.

The launch runs once on the interpreter, which gives the raw arguments and the results to expect; it
then becomes a call folder (see `calls.py`). What the host function
gives is compared with the reference, so that the results to expect are right.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segattn import __version__
from segattn.benchmarks.device.calls import (
    DeviceError,
    compile_and_run,
    measure,
    profile,
    require_device,
    save_call,
)
from segattn.benchmarks.device.compile_gate import kernel_name, named_arguments, prepared
from segattn.benchmarks.kernels.targets import Target
from segattn.benchmarks.kernels.workloads import Workload
from segattn.benchmarks.user_kernel import relative_error
from segattn.reference import attention
from segattn.reference.nki.cost.constants import BASE
from segattn.reference.outputs import OutputFile

TOLERANCE = 1e-2
"""Relative L2 error allowed between device and interpreter, and interpreter and reference: bf16."""


@dataclass(frozen=True)
class CapturedLaunch:
    """One raw kernel launch of a host function."""

    kernel: str
    """"module:function" inside the package."""
    arguments: dict[str, Any]
    """Copies from before the launch, by parameter name."""
    num_cores: int
    results: tuple[NDArray[Any], ...]


def capture(workload: Workload, lnc: int = 1) -> tuple[CapturedLaunch, Any]:
    """The launch of a workload and the results of its host function, on the interpreter.

    Where the check of the bounded softmax fails, the launch is the one that fails.
    """
    launch = prepared(workload, lnc=lnc)
    copies = {
        name: value.copy() if isinstance(value, np.ndarray) else value
        for name, value in named_arguments(launch).items()
    }
    results = import_module("segattn.kernels.launch").execute(launch)
    arrays = results if isinstance(results, tuple) else (results,)
    kept = tuple(np.array(array) for array in arrays)
    captured = CapturedLaunch(kernel_name(launch), copies, launch.grid, kept)
    return captured, launch.finish(results)


def reference_error(workload: Workload, result: Any) -> float:
    """Largest relative error of the results of `capture`: attention and caches."""
    reference: Mapping[str, Any] = vars(attention)
    arguments = workload.arguments(np.random.default_rng(0))
    arguments.pop("softmax", None)  # which only kernels have a choice of
    expected = reference[workload.kernel](**arguments)
    if not isinstance(expected, tuple):
        result, expected = (result,), (expected,)
    return max(map(relative_error, result, expected))


def measure_workload(target: Target, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the results: measured times of a workload's launch, and errors."""
    workload = target.workload
    name = workload.label.translate(str.maketrans("/ ,()", "_____"))
    launch, result = capture(workload, options.lnc)
    folder, cores = options.calls / name, launch.num_cores
    save_call(folder, launch.kernel, launch.arguments, cores)
    outputs = compile_and_run(folder, cores)
    worst = max(
        relative_error(outputs[str(position)], expected)
        for position, expected in enumerate(launch.results)
    )
    timing = measure(folder, options.nrtpy_python, options.iterations)
    if options.profile:
        profile(folder)
    p50 = timing.p50_us
    flops, moved = workload.model_flops, workload.model_bytes
    return {
        "label": workload.label,
        "kernel": workload.kernel,
        "p50_us": p50,
        "p99_us": timing.p99_us,
        "iterations": options.iterations,
        "relative_error": worst,
        "reference_error": reference_error(workload, result),
        "num_cores": cores,
        "mfu": flops / BASE.peak_flops_per_ns / cores / p50 / 1e3,
        "hbm_share": moved / BASE.hbm_rate / cores / p50 / 1e3,
        "target": target.at_least,
        "metric": target.metric,
    }


def run_measured(targets: Sequence[Target], options: argparse.Namespace) -> int:
    """Measure on the device; 1 if a row failed or is wrong. DeviceError without a device."""
    require_device()
    out = OutputFile(options.out) if options.out else None
    text = sys.stderr if options.json else sys.stdout
    rows: list[dict[str, Any]] = []
    for target in targets:
        label = target.workload.label
        try:
            row = measure_workload(target, options)
        except DeviceError as error:
            # The other rows are worth measuring all the same.
            row = {"label": label, "kernel": target.workload.kernel, "error": str(error)}
            print(f"{label}: FAILED: {error}", file=text)
        else:
            verdict = "ok" if _is_right(row) else "WRONG"
            print(
                f"{label}: measured p50 {row['p50_us']:.1f} us, p99 {row['p99_us']:.1f} us, "
                f"{row['mfu'] if row['metric'] == 'mfu' else row['hbm_share']:.1%}, "
                f"relative error {row['relative_error']:.1e}, of what was expected "
                f"{row['reference_error']:.1e}: {verdict}",
                file=text,
            )
        rows.append(row)
        results = {"kind": "measured", "segattn": __version__, "rows": rows}
        if out:
            out.save_json(results)
    if options.json:
        print(json.dumps(results, indent=1))
    return 0 if all(map(_is_right, rows)) else 1


def _is_right(row: dict[str, Any]) -> bool:
    errors = row.get("relative_error", np.inf), row.get("reference_error", np.inf)
    return bool(max(errors) <= TOLERANCE)
