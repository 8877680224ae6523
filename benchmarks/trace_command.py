"""`segattn trace SCRIPT [ARG ...]`: model every NKI kernel that a Python script launches.

The script runs unchanged with `nki` standing for this project's interpreter. For each launch the
terminal shows what bounds it and where its engines wait; `--perfetto` writes timelines for
ui.perfetto.dev. All times are modelled, none measured. A script that fails does so after the report
of the launches before.
"""

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from traceback import walk_tb

from segattn.benchmarks.kernels.cost_report import report
from segattn.reference import nki
from segattn.reference.nki import launch as launching
from segattn.reference.nki.cost.constants import BASE, CostConstants
from segattn.reference.nki.cost.perfetto import write_perfetto
from segattn.reference.nki.trace import Trace


def parser() -> argparse.ArgumentParser:
    """Options, then the script and its own arguments."""
    made = argparse.ArgumentParser("segattn trace", description=__doc__)
    made.add_argument("--stalls", type=int, default=10, help="stalls shown per launch")
    made.add_argument("--path", action="store_true", help="print the critical path per launch")
    made.add_argument("--perfetto", type=Path, help="folder for one timeline per launch")
    made.add_argument("--constants", type=Path, help="microbenchmark results to model with")
    made.add_argument("script", type=Path)
    made.add_argument("arguments", nargs=argparse.REMAINDER)
    return made


def main(argv: Sequence[str]) -> int:
    """Command line; 2 when the script or the constants cannot be read, or no kernel runs."""
    options = parser().parse_args(argv)
    if options.stalls < 0:
        parser().error(f"--stalls={options.stalls}: must be at least 0")
    if not options.script.is_file():
        print(f"error: script {str(options.script)!r} is not a file", file=sys.stderr)
        return 2
    try:
        constants = CostConstants.from_results(options.constants) if options.constants else BASE
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    nki.install()
    before, path = sys.argv, sys.path
    sys.argv = [str(options.script), *options.arguments]
    sys.path = [str(options.script.resolve().parent), *path]  # as `python SCRIPT` has it
    failure: BaseException | None = None
    with Trace() as trace:
        try:
            runpy.run_path(str(options.script), run_name="__main__")
        except BaseException as error:  # raised again behind the report of what did run
            failure = error
        finally:
            sys.argv, sys.path = before, path
    if not trace.launches and failure is None:
        print(f"error: {options.script} launched no NKI kernel", file=sys.stderr)
        return 2
    launches = list(trace.launches)
    if failure is not None and _in_kernel(failure):
        print(f"launch {len(launches)}, {launches.pop().kernel}, failed: left out", file=sys.stderr)
    for number, launch in enumerate(launches):
        result = report(launch, constants, options.stalls, options.path)
        if options.perfetto:
            options.perfetto.mkdir(parents=True, exist_ok=True)
            write_perfetto(result, options.perfetto / f"{number:03}_{launch.kernel}.json")
    if failure is not None:
        raise failure
    return 0


def _in_kernel(failure: BaseException) -> bool:
    """Whether a script failed inside a launch and not between two."""
    codes = (frame.f_code for frame, _ in walk_tb(failure.__traceback__))
    return any((c.co_filename, c.co_name) == (launching.__file__, "body") for c in codes)
