"""`segattn bench microbenchmarks`: settle the open constants of the cost model on a device.

`--backend device` compiles and times every kernel of the sheet on a trn2 instance and writes a
results file; `segattn bench kernels --constants FILE` then models with the measured constants.
`--backend interpreter` models the sheet with the constants it has: a check of the sheet itself.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from segattn import __version__
from segattn.benchmarks.device.calls import (
    DeviceError,
    compile_and_run,
    measure,
    require_device,
    save_call,
)
from segattn.benchmarks.microbenchmarks.findings import FINDINGS
from segattn.benchmarks.microbenchmarks.sheet import KERNELS, SHEET, Arguments, Array, Experiment
from segattn.reference.nki.cost.constants import BASE, CostConstants
from segattn.reference.nki.cost.result import evaluate
from segattn.reference.nki.trace import Trace

Runner = Callable[[str, str, Arguments], float]
"""(kernel, name of the run, arguments) -> ns."""


def modelled_runner(constants: CostConstants = BASE) -> Runner:
    """Times that the cost model gives for micro-kernels on the interpreter."""
    os.environ["SEGATTN_BACKEND"] = "interpreter"
    kernels = import_module(f"segattn.{KERNELS}")

    def modelled_ns(kernel: str, run: str, arguments: Arguments) -> float:
        with Trace() as trace:
            getattr(kernels, kernel)(**arguments)
        return evaluate(trace.launches[0], constants).modelled_ns

    return modelled_ns


def _device_runner(folder: Path, nrtpy_python: Path) -> Runner:
    def measured_ns(kernel: str, run: str, arguments: Arguments) -> float:
        call = folder / run
        save_call(call, f"{KERNELS}:{kernel}", arguments)
        compile_and_run(call)
        return 1e3 * measure(call, nrtpy_python).p50_us

    return measured_ns


def run_experiment(experiment: Experiment, runner: Runner) -> dict[int, float]:
    """Time of one repetition at every point, in ns."""
    number = 0

    def ns(arguments: Arguments) -> float:
        nonlocal number
        number += 1
        return runner(experiment.kernel, f"{experiment.name}_{number}", arguments)

    return experiment.per_repetition(ns)


def run_sheet(runner: Runner, experiments: Sequence[Experiment]) -> dict[str, Any]:
    """Times per repetition, fitted constants and findings, printed as they come."""
    times: dict[str, dict[int, float]] = {}
    constants: dict[str, float] = {}
    findings: dict[str, bool] = {}
    for experiment in experiments:
        measured = times[experiment.name] = run_experiment(experiment, runner)
        fitted = experiment.fit(measured)
        constants.update(fitted)
        shown = ", ".join(f"{point}: {ns:.1f} ns" for point, ns in measured.items())
        print(f"{experiment.name}: {experiment.question}\n  {shown}")
        for name, value in fitted.items():
            print(f"  {name} = {value:.4g} (base {getattr(BASE, name):.4g})")
        answers = experiment.answers(measured)
        findings.update(answers)
        for name, answer in answers.items():
            print(f"  {name}: {answer}")
    return {"ns_per_repetition": times, "constants": constants, "findings": findings}


def run_findings(results_of: Callable[[str, Arguments], Array]) -> dict[str, bool]:
    """Answers to the questions of values, printed as they come."""
    found: dict[str, bool] = {}
    for finding in FINDINGS:
        arguments = finding.arguments()
        answers = finding.answers(arguments, results_of(finding.kernel, arguments))
        found.update(answers)
        for name, answer in answers.items():
            print(f"{name}: {answer}")
    return found


def _device_results(folder: Path) -> Callable[[str, Arguments], Array]:
    def results_of(kernel: str, arguments: Arguments) -> Array:
        save_call(folder / kernel, f"{KERNELS}:{kernel}", arguments)
        return compile_and_run(folder / kernel)["0"]

    return results_of


def parser() -> argparse.ArgumentParser:
    """Options of the command."""
    made = argparse.ArgumentParser("segattn bench microbenchmarks", description=__doc__)
    made.add_argument("--backend", choices=("interpreter", "device"), default="interpreter")
    made.add_argument("--out", type=Path, help="write the results file here (needed on a device)")
    made.add_argument(
        "--calls",
        type=Path,
        default=Path("microbenchmark_calls"),
        help="folder that keeps NEFFs, inputs and timings",
    )
    made.add_argument(
        "--nrtpy-python",
        type=Path,
        default=Path("nrtpy_venv/bin/python"),
        help="Python of the environment with AWS's nrtpy",
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Command line; 2 without a device when one is asked for."""
    options = parser().parse_args(argv)
    if options.backend == "interpreter":
        print("Modelled with the constants of the cost model, nothing measured.")
        interpreted = [each for each in SHEET if not each.device_only]
        results = {"kind": "modelled", **run_sheet(modelled_runner(), interpreted)}
    else:
        try:
            require_device()
            runner = _device_runner(options.calls, options.nrtpy_python)
            results = {"kind": "measured", **run_sheet(runner, SHEET)}
            results["findings"] |= run_findings(_device_results(options.calls))
        except DeviceError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if options.out:
        facts = {"segattn": __version__, "platform": platform.platform()}
        options.out.write_text(json.dumps({**results, **facts}, indent=1))
    return 0
