"""Settle the open constants of the cost model on a device.

`--backend device` compiles and times every kernel of the sheet on a trn2 instance and writes a
results file; `segattn bench kernels --constants FILE` then models with the measured constants.
`--backend interpreter` models the sheet with the constants it has: a check of the sheet itself.
"""

import contextlib
import json
import os
import platform
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from segattn import __version__
from segattn.benchmarks.device.calls import (
    DeviceError,
    add_device_options,
    compile_and_run,
    measure,
    require_device,
    save_call,
)
from segattn.benchmarks.microbenchmarks.findings import FINDINGS
from segattn.benchmarks.microbenchmarks.sheet import KERNELS, SHEET, Arguments, Array, Experiment
from segattn.reference.nki.cost.constants import BASE, CostConstants
from segattn.reference.nki.cost.result import evaluate
from segattn.reference.nki.strict import strict
from segattn.reference.nki.trace import Trace
from segattn.reference.outputs import OutputFile

Runner = Callable[[str, str, Arguments], float]
"""(kernel, name of the run, arguments) -> ns."""


def modelled_runner(constants: CostConstants = BASE) -> Runner:
    """Times that the cost model gives for micro-kernels on the interpreter.

    Without `loop_skip`, the rule that one of the experiments is about.
    """
    os.environ["SEGATTN_BACKEND"] = "interpreter"
    kernels = import_module(f"segattn.{KERNELS}")

    def modelled_ns(kernel: str, run: str, arguments: Arguments) -> float:
        with Trace() as trace, strict(loop_skip="off"):
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


def run_sheet(
    runner: Runner,
    experiments: Sequence[Experiment],
    results: dict[str, Any] | None = None,
    keep: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Times per repetition, fitted constants and findings, printed as they come.

    They join `results`, and `keep` is called after each experiment. One that fails on the device
    is listed under "failed"; the others are worth measuring all the same.
    """
    results = {} if results is None else results
    for part in ("ns_per_repetition", "constants", "findings", "failed"):
        results[part] = {}
    for experiment in experiments:
        print(_wrapped(f"{experiment.name}: {experiment.question}"))
        try:
            measured = run_experiment(experiment, runner)
        except DeviceError as error:
            results["failed"][experiment.name] = str(error)
            print(f"  FAILED: {error}")
            keep()
            continue
        results["ns_per_repetition"][experiment.name] = measured
        print(_wrapped("  " + ", ".join(f"{at}: {ns:.1f} ns" for at, ns in measured.items())))
        fitted = experiment.fit(measured)
        results["constants"].update(fitted)
        for name, value in fitted.items():
            print(f"  {name} = {value:.4g} (base {getattr(BASE, name):.4g})")
        answers = experiment.answers(measured)
        results["findings"].update(answers)
        for name, answer in answers.items():
            print(f"  {name}: {answer}")
        keep()
    return results


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 80, subsequent_indent="  ")


def run_findings(
    results_of: Callable[[str, Arguments], Array], failed: dict[str, str] | None = None
) -> dict[str, bool]:
    """Answers to the questions of values, printed as they come; what fails joins `failed`."""
    found: dict[str, bool] = {}
    for finding in FINDINGS:
        arguments = finding.arguments()
        try:
            answers = finding.answers(arguments, results_of(finding.kernel, arguments))
        except DeviceError as error:
            if failed is None:
                raise
            failed[finding.kernel] = str(error)
            print(f"{finding.kernel}: FAILED: {error}")
            continue
        found.update(answers)
        for name, answer in answers.items():
            print(f"{name}: {answer}")
    return found


def _device_results(folder: Path) -> Callable[[str, Arguments], Array]:
    def results_of(kernel: str, arguments: Arguments) -> Array:
        save_call(folder / kernel, f"{KERNELS}:{kernel}", arguments)
        return compile_and_run(folder / kernel)["0"]

    return results_of


def add_arguments(parser: ArgumentParser) -> None:
    """Backend, experiments, where results go."""
    parser.add_argument("--backend", choices=("interpreter", "device"), default="interpreter")
    parser.add_argument("--only", default="", help="experiments whose name contains this text")
    parser.add_argument("--out", type=Path, help="write the results file here, as it goes")
    add_device_options(parser, Path("microbenchmark_calls"))


def _selected(only: str) -> list[Experiment]:
    chosen = [each for each in SHEET if only in each.name]
    if not chosen:
        raise ValueError(
            f"--only is {only!r}; it must occur in one of: {', '.join(e.name for e in SHEET)}"
        )
    return chosen


def run(options: Namespace) -> int:
    """Run the sheet; 1 if an experiment failed."""
    out = OutputFile(options.out) if options.out else None
    device = options.backend == "device"
    facts = {"segattn": __version__, "platform": platform.platform()}
    results: dict[str, Any] = {"kind": "measured" if device else "modelled", **facts}

    def keep() -> None:
        if out:
            out.save_json(results)

    chosen = _selected(options.only)
    show = sys.stderr if options.json else sys.stdout
    with contextlib.redirect_stdout(show):
        if device:
            require_device()
            runner = _device_runner(options.calls, options.nrtpy_python)
            run_sheet(runner, chosen, results, keep)
            if not options.only:
                found = run_findings(_device_results(options.calls), results["failed"])
                results["findings"].update(found)
        else:
            print("Modelled with the constants of the cost model, nothing measured.")
            interpreted = [each for each in chosen if not each.device_only]
            run_sheet(modelled_runner(), interpreted, results, keep)
    keep()
    if options.json:
        print(json.dumps(results, indent=1))
    return 1 if results["failed"] else 0
