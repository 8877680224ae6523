"""The device side of `segattn bench kernels`: compile, check, time, keep the NEFF.

The host function runs once on the interpreter, which gives the launches' raw arguments and the
results to expect; each launch then becomes a call folder (see `calls.py`). What the host function
gives is compared with the reference, so that the results to expect are right.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from segattn import __version__
from segattn.benchmarks.device.calls import (
    DeviceError,
    Timing,
    compile_and_run,
    measure,
    profile,
    require_device,
    save_call,
)
from segattn.benchmarks.kernels.modelled import Functions, public_functions
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
    num_cores: int | None
    results: tuple[NDArray[Any], ...]


@contextmanager
def _captured() -> Iterator[list[CapturedLaunch]]:
    """Collects the launches of host functions called inside."""
    backend = import_module("segattn.kernels.backend")
    captured: list[CapturedLaunch] = []
    original = backend.run

    def run(kernel: Any, lnc: int, *args: Any) -> Any:
        function = kernel.function
        bound = signature(function).bind(*args)
        copies = {
            name: value.copy() if isinstance(value, np.ndarray) else value
            for name, value in bound.arguments.items()
        }
        results = original(kernel, lnc, *args)
        arrays = results if isinstance(results, tuple) else (results,)
        module = function.__module__.removeprefix("segattn.")
        captured.append(
            CapturedLaunch(
                f"{module}:{function.__name__}",
                copies,
                lnc,
                tuple(np.array(array) for array in arrays),
            )
        )
        return results

    # The host functions have no hook for this, and only a benchmark needs one.
    with mock.patch.object(backend, "run", run):
        yield captured


def capture(
    workload: Workload, functions: Functions, lnc: int = 1
) -> tuple[list[CapturedLaunch], Any]:
    """Launches and results of one call of a workload on the interpreter.

    Cache writes take one core.
    """
    options = {} if workload.kernel == "write_kv_cache" else {"lnc": lnc}
    with _captured() as captured:
        result = functions[workload.kernel](
            **workload.arguments(np.random.default_rng(0)), **options
        )
    return captured, result


def reference_error(workload: Workload, result: Any) -> float:
    """Largest relative error of the results of `capture`: attention and caches."""
    reference: Functions = vars(attention)
    arguments = workload.arguments(np.random.default_rng(0))
    arguments.pop("softmax", None)  # which only kernels have a choice of
    expected = reference[workload.kernel](**arguments)
    if not isinstance(expected, tuple):
        result, expected = (result,), (expected,)
    return max(map(relative_error, result, expected))


def measure_workload(
    target: Target, functions: Functions, options: argparse.Namespace
) -> dict[str, Any]:
    """One row of the results: measured times of all launches of a workload, and errors."""
    workload = target.workload
    name = workload.label.translate(str.maketrans("/ ,()", "_____"))
    timings: list[Timing] = []
    worst, cores = 0.0, 1
    launches, result = capture(workload, functions, options.lnc)
    for number, launch in enumerate(launches):
        folder = options.calls / f"{name}_{number}"
        cores = launch.num_cores or 1
        save_call(folder, launch.kernel, launch.arguments, launch.num_cores)
        outputs = compile_and_run(folder, cores)
        for position, expected in enumerate(launch.results):
            worst = max(worst, relative_error(outputs[str(position)], expected))
        timings.append(measure(folder, options.nrtpy_python, options.iterations))
        if options.profile:
            profile(folder)
    p50 = sum(t.p50_us for t in timings)
    flops, moved = workload.model_flops, workload.model_bytes
    return {
        "label": workload.label,
        "kernel": workload.kernel,
        "p50_us": p50,
        "p99_us": sum(t.p99_us for t in timings),
        "iterations": options.iterations,
        "relative_error": worst,
        "reference_error": reference_error(workload, result),
        "num_cores": cores,
        "mfu": flops / BASE.peak_flops_per_ns / cores / p50 / 1e3,
        "hbm_share": moved / BASE.hbm_rate / cores / p50 / 1e3,
        "target": target.at_least,
        "metric": target.metric,
    }


def run_measured(
    targets: Sequence[Target],
    options: argparse.Namespace,
    functions: Callable[[], Functions] = public_functions,
) -> int:
    """Measure on the device; 1 if a row failed or is wrong. DeviceError without a device."""
    require_device()
    out = OutputFile(options.out) if options.out else None
    text = sys.stderr if options.json else sys.stdout
    rows: list[dict[str, Any]] = []
    for target in targets:
        label = target.workload.label
        try:
            row = measure_workload(target, functions(), options)
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
