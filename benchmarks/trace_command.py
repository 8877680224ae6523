"""Model every NKI kernel that a Python script launches.

The script runs unchanged with `nki` standing for this project's interpreter. For each launch the
terminal shows what bounds it and where its engines wait; `--perfetto` writes timelines for
ui.perfetto.dev. All times are modelled, none measured. A script that fails does so after the report
of the launches before, with its own traceback.
"""

import argparse
import importlib.util
import json
import runpy
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import TracebackType

from segattn.benchmarks.kernels.cost_report import model_bands, print_report
from segattn.benchmarks.launch_summary import launch_rows, launch_table, save_timeline
from segattn.reference import nki
from segattn.reference.nki import launch as launching
from segattn.reference.nki.cost.constants import BASE, CostConstants
from segattn.reference.nki.trace import Launch, Trace
from segattn.reference.outputs import output_folder


def add_arguments(parser: ArgumentParser) -> None:
    """Options, then the script and its own arguments."""
    parser.add_argument("--stalls", type=int, default=10, help="stalls shown per launch (10)")
    parser.add_argument("--path", action="store_true", help="print the critical path per launch")
    parser.add_argument("--perfetto", type=Path, help="folder for one timeline per launch")
    parser.add_argument("--constants", type=Path, help="microbenchmark results to model with")
    parser.add_argument("--wide", action="store_true", help="all columns of the table")
    parser.add_argument(
        "-m", dest="module", action="store_true", help="the script is the name of a module"
    )
    parser.add_argument("script", help="a file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def run(options: Namespace) -> int:
    """Run the script and report its launches; 1 when it failed."""
    if options.stalls < 0:
        options.parser.error(f"--stalls={options.stalls}: must be at least 0")
    if not options.module and not Path(options.script).is_file():
        raise ValueError(f"script {options.script!r} is not a file")
    constants = CostConstants.from_results(options.constants) if options.constants else BASE
    folder = output_folder(options.perfetto) if options.perfetto else None
    launches, failure = _launches_of(options)
    if not launches and failure is None:
        raise ValueError(f"{options.script} launched no NKI kernel")
    every = []
    for number, launch in enumerate(launches):
        bands = model_bands(launch, constants)
        every.append(bands)
        result = bands["base"]
        if not options.json:
            print_report(bands, options.stalls, options.path, wide=options.wide)
        if folder:
            save_timeline(result, folder / f"{number:03}_{launch.kernel}.json")
    rows = launch_rows(every)
    print(json.dumps(rows) if options.json else launch_table(rows, options.wide))
    if isinstance(failure, (SystemExit, KeyboardInterrupt)):
        raise failure
    if failure is not None:
        sys.stdout.flush()
        own = _own_traceback(failure)
        traceback.print_exception(type(failure), failure, own or failure.__traceback__)
    return int(failure is not None)


def _own_traceback(failure: BaseException) -> TracebackType | None:
    """From the script's own frame on: runpy and this file are nobody's business."""
    found = failure.__traceback__
    while found is not None and "runpy" not in found.tb_frame.f_code.co_filename:
        found = found.tb_next
    while found is not None and "runpy" in found.tb_frame.f_code.co_filename:
        found = found.tb_next
    return found


def _launches_of(options: Namespace) -> tuple[list[Launch], BaseException | None]:
    """The launches of the script that were whole, and what it raised."""
    if options.module:
        with _as_main(options):
            _require_module(options.script)
    nki.install()
    failure: BaseException | None = None
    with Trace() as trace, _as_main(options):
        try:
            if options.module:
                runpy.run_module(options.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(options.script, run_name="__main__")
        except BaseException as error:  # told behind the report of what did run
            if isinstance(error, ImportError) and _own_traceback(error) is None:
                raise ValueError(f"module {options.script!r} cannot be run: {error}") from error
            failure = error
    launches = list(trace.launches)
    if failure is not None and _in_kernel(failure):
        print(f"launch {len(launches)}, {launches.pop().kernel}, failed: left out", file=sys.stderr)
    return launches, failure


def _require_module(name: str) -> None:
    """ValueError if there is no such module, or no package that it could be in; runs no code."""
    package = name.partition(".")[0]
    if not package or importlib.util.find_spec(package) is None:
        raise ValueError(f"module {package!r} does not exist")


@contextmanager
def _as_main(options: Namespace) -> Iterator[None]:
    """sys.argv and sys.path as `python SCRIPT` and `python -m MODULE` have them."""
    before, path = sys.argv, sys.path
    folder = Path() if options.module else Path(options.script).parent
    sys.argv = [options.script, *options.arguments]
    sys.path = [str(folder.resolve()), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = before, path


def _in_kernel(failure: BaseException) -> bool:
    """Whether a script failed inside a launch and not between two."""
    codes = (frame.f_code for frame, _ in walk_tb(failure.__traceback__))
    return any((c.co_filename, c.co_name) == (launching.__file__, "body") for c in codes)
