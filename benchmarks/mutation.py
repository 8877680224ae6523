"""Break the scheduler on purpose, once per mutant, and see whether the tests notice.

`python -m segattn.benchmarks.mutation --out mutations.json` runs from the root of the repository.
Each mutant lives in a process of its own and is judged in stages: recorded traces of vLLM and
traces of the fuzzer under the default policy, then the tests of the scheduler, then the tests that
fail every inner call. A mutant that passes all of them survives.
"""

import argparse
import gzip
import json
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from segattn.benchmarks.mutations import mutations_of
from segattn.reference.extras import MissingExtraError

try:
    import pytest
except ModuleNotFoundError as error:
    raise MissingExtraError("pytest", "test") from error

PACKAGE = "segattn.scheduler"
NOT_MUTATED = {
    "__init__": "imports alone",
    "replay": "tells that traces differ; part of the judge",
    "trace": "turns events into calls; part of the judge",
    "vllm_plugin": "needs vLLM, whose environment has its own tests",
}
STAGES = ("traces", "unit tests", "atomicity tests")
ATOMICITY_TESTS = "test_atomicity.py"
GOLDEN_TESTS = "test_golden_traces.py"
CPU_SECONDS = (15, 60, 200)
"""Per stage; many times what the true scheduler takes, so a mutant beyond it loops for ever."""
MEMORY_BYTES = 4 << 30
SURVIVED = 0


class MutantFinder(MetaPathFinder, Loader):
    """Imports one module of the package from mutated source."""

    def __init__(self, module: str, source: str) -> None:
        self.module, self.source = module, source

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """The spec of the mutated module; other modules are none of its business."""
        if fullname != self.module:
            return None
        return ModuleSpec(fullname, self, origin=f"mutant of {fullname}")

    def exec_module(self, module: ModuleType) -> None:
        """Run the mutated source."""
        exec(compile(self.source, f"<mutant of {self.module}>", "exec"), module.__dict__)


def load_traces(paths: Sequence[Path], every: int) -> list[dict[str, Any]]:
    """Some traces of each file, the short ones first."""
    traces = []
    for path in paths:
        with gzip.open(path, "rt") as lines:
            traces += [json.loads(line) for line in list(lines)[::every]]
    return sorted(traces, key=lambda trace: len(trace["events"]))


@dataclass(frozen=True)
class Judge:
    """What a mutant must pass to survive: traces, and how many of `STAGES`."""

    root: Path
    traces: Sequence[dict[str, Any]]
    num_stages: int


def judge(source: str, module: str, by: Judge) -> int:
    """In a fresh process: number of the stage that notices the mutant, from 1; 0 if none."""
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]
    sys.meta_path.insert(0, MutantFinder(module, source))
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS[0])
        if _fails_traces(by.traces):
            return 1
        tests = by.root / "tests" / "scheduler"
        special = {GOLDEN_TESTS, ATOMICITY_TESTS}
        unit_tests = [path for path in tests.glob("test_*.py") if path.name not in special]
        stages = (sorted(unit_tests), [tests / ATOMICITY_TESTS])
        for stage, paths in enumerate(stages[: by.num_stages - 1], start=2):
            signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS[stage - 1])
            options = ["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(by.root)]
            if pytest.main([*options, *map(str, paths)]) != 0:
                return stage
        return SURVIVED
    except BaseException:  # a mutant that cannot even be imported or judged is noticed
        return 1


def _fails_traces(traces: Sequence[dict[str, Any]]) -> bool:
    from segattn.scheduler.replay import replay

    return any(replay(trace) is not None for trace in traces)


def run_mutant(source: str, module: str, by: Judge) -> int:
    """Judge a mutant in a forked process; one that never ends is noticed by stage 1."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os._exit(judge(source, module, by))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1


def main(argv: Sequence[str]) -> int:
    """Command line; 0 when the run is complete, whatever survived."""
    parser = argparse.ArgumentParser("segattn.benchmarks.mutation", description=__doc__)
    parser.add_argument("--count", type=int, help="random sample of so many mutants (all)")
    parser.add_argument("--stages", type=int, default=3, choices=(1, 2, 3), help="stages (3)")
    parser.add_argument("--only", default="", help="modules whose names contain this")
    parser.add_argument("--fuzz-traces", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this time")
    parser.add_argument("--out", type=Path, required=True, help="JSON with every survivor")
    arguments = parser.parse_args(argv)
    root = Path.cwd()
    golden = sorted((root / "tests" / "data" / "traces").glob("*.jsonl.gz"))
    traces = load_traces(golden, 12) + load_traces(arguments.fuzz_traces, 1)
    by = Judge(root, traces, arguments.stages)
    end = time.monotonic() + 60 * arguments.minutes
    counts: Counter[str] = Counter()
    survivors = []
    every = [
        (path, mutation)
        for path in sorted((root / "scheduler").glob("*.py"))
        if path.stem not in NOT_MUTATED and arguments.only in path.stem
        for mutation in mutations_of(path.read_text())
    ]
    # In random order, so that a run that is stopped early has judged a fair sample.
    random.Random(0).shuffle(every)
    for path, mutation in every[: arguments.count]:
        if time.monotonic() > end:
            break
        stage = run_mutant(mutation.apply(path.read_text()), f"{PACKAGE}.{path.stem}", by)
        counts["survived" if stage == SURVIVED else STAGES[stage - 1]] += 1
        if stage == SURVIVED:
            survivors.append({"file": path.name, "line": mutation.line, "change": mutation.change})
            print(f"survived: {path.name}:{mutation.line} {mutation.change}", flush=True)
        report = {"all": len(every), "counts": counts, "survivors": survivors}
        arguments.out.write_text(json.dumps(report, indent=1))
    print(f"{sum(counts.values())} of {len(every)} mutants: {dict(counts)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
