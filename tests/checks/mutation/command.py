"""Break scheduler and runner on purpose, once per mutant, and see whether the tests notice.

`python -m segattn.tests.checks.mutation --out FOLDER` runs from the repository's root and can be
stopped and continued: verdicts are kept in FOLDER, and hold as long as the function that they are
about stays as it is. Each mutant lives in a forked process and is judged by the cases that reach
it (see `cases`), the fast ones first, until one fails. A mutant that passes all of them
survives. `--report FILE` writes the record.
"""

import argparse
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from segattn.reference.extras import MissingExtraError
from segattn.tests.checks.mutation.cases import (
    STAGES,
    Case,
    Suite,
    load_suite,
    module_of,
    pytest_options,
)
from segattn.tests.checks.mutation.mutants import Mutation, mutations_of
from segattn.tests.checks.mutation.report import SURVIVED, load_reasons, place_of, report

try:
    import pytest
    from hypothesis import HealthCheck, Phase, settings
except ImportError as error:
    raise MissingExtraError("pytest", "test") from error

AFFECTED = ("scheduler", "runner", "benchmarks", "tests")
"""Sub-packages that a mutant imports anew: its own and those that have imported it."""
RUNNER_FILES = ("engine", "model_runner", "padding")
NOT_MUTATED = ("__init__", "decode_node", "vllm_answers", "vllm_options", "vllm_plugin")
"""Of the scheduler: imports alone, and what only tests with vLLM reach, which take minutes each."""
LEAST_SECONDS, SLOWDOWN = 3.0, 20.0
"""A case that takes so many times its usual CPU time loops for ever."""
LONG_STAGE = 10
"""Times the seconds of other stages that failed steps get: any of them may reach any line."""
MEMORY_BYTES = 4 << 30


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
        """Run the mutated source, under the file name that the tests look for."""
        origin = Path(__file__).parents[3].joinpath(*self.module.split(".")[1:]).with_suffix(".py")
        exec(compile(self.source, str(origin), "exec"), module.__dict__)


@dataclass(frozen=True)
class Mutant:
    """A mutation of one module; `module` such as scheduler.step."""

    module: str
    mutation: Mutation
    key: str

    def verdict(self, stage: str, case: str) -> dict[str, object]:
        """What is kept of its judgement."""
        found = self.mutation
        return {
            "key": self.key,
            "file": f"{self.module.removeprefix('scheduler.').replace('.', '/')}.py",
            "function": found.place.function,
            "line": found.line,
            "change": found.change,
            "stage": stage,
            "case": case,
        }


def mutants_of(path: Path, root: Path) -> Iterator[Mutant]:
    """All mutants of a module; equal changes of one function are numbered."""
    seen: dict[str, int] = {}
    module = module_of(path, root)
    for mutation in mutations_of(path.read_text()):
        place = mutation.place
        name = module.removeprefix("scheduler.")
        key = f"{name} {place.function} {place.digest} {mutation.change}"
        seen[key] = seen.get(key, 0) + 1
        yield Mutant(module, mutation, f"{key} #{seen[key]}")


class TestTimer:
    """A pytest plugin that tells the case and limits its time."""

    __test__ = False

    def __init__(self, cases: Sequence[Case], tell: int) -> None:
        self._cases = {case.name: case for case in cases}
        self._tell = tell

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Before each test."""
        _begin(self._cases[item.nodeid], self._tell)


def _begin(case: Case, tell: int) -> None:
    os.write(tell, f"{case.stage}\t{case.name}\n".encode())
    signal.setitimer(signal.ITIMER_VIRTUAL, max(LEAST_SECONDS, SLOWDOWN * case.seconds))


def judge(source: str, mutant: Mutant, suite: Suite, seconds: float, tell: int) -> bool:
    """In a fresh process: whether the mutant passes its cases; `tell` gets each one's name."""
    # pytest names the tests after the folder of the clone.
    for name in list(sys.modules):
        package, *inner = name.split(".")
        if package in ("segattn", suite.root.name) and inner and inner[0] in AFFECTED:
            del sys.modules[name]
    sys.meta_path.insert(0, MutantFinder(f"segattn.{mutant.module}", source))
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, LEAST_SECONDS)
        passes = import_module("segattn.tests.checks.mutation.cases").passes
        for stage in STAGES:
            most = seconds * (LONG_STAGE if stage == STAGES[3] else 1)
            cases = suite.reaching(stage, mutant.module, mutant.mutation.place.lines, most)
            if "tests" in stage and cases:
                names = [f"{suite.root}/{case.name}" for case in cases]
                plugin = TestTimer(cases, tell)
                if pytest.main([*pytest_options(suite.root), *names], [plugin]) != 0:
                    return False
            elif "tests" not in stage:
                for case in cases:
                    _begin(case, tell)
                    if not passes(case, suite):
                        return False
        return True
    except BaseException:  # a mutant that cannot even be imported or judged is noticed
        return False


def run_mutant(source: str, mutant: Mutant, suite: Suite, seconds: float) -> tuple[str, str]:
    """Judge a mutant in a forked process: the stage and the case that notice it.

    One that never ends is noticed by the case that it was at.
    """
    read, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os._exit(0 if judge(source, mutant, suite, seconds, tell) else 1)
    os.close(tell)
    with os.fdopen(read) as told:
        lines = told.read().splitlines()
    _, status = os.waitpid(child, 0)
    if status == 0:
        return SURVIVED, ""
    stage, _, case = (lines[-1] if lines else f"{STAGES[0]}\timport").partition("\t")
    return stage, f"{case}{' (no end)' if os.WIFSIGNALED(status) else ''}"


def check_judge(mutant: Mutant, root: Path, suite: Suite, seconds: float) -> None:
    """AssertionError if the true source of a module, in a mutant's place, does not survive."""
    found = run_mutant(source_of(mutant, root), mutant, suite, seconds)
    assert found == (SURVIVED, ""), f"{mutant.module}.py is noticed without any mutation: {found}"


def source_of(mutant: Mutant, root: Path) -> str:
    """The true source of its module."""
    return root.joinpath(*mutant.module.split(".")).with_suffix(".py").read_text()


def read_verdicts(path: Path) -> dict[str, dict[str, Any]]:
    """Kept verdicts by key; the latest of each mutant counts."""
    if not path.exists():
        return {}
    verdicts = map(json.loads, path.read_text().splitlines())
    return {verdict["key"]: verdict for verdict in verdicts}


def main(argv: Sequence[str]) -> int:
    """Command line; 0 when the run is complete, whatever survived."""
    parser = argparse.ArgumentParser("segattn.tests.checks.mutation", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for verdicts")
    parser.add_argument("--only", default="", help="modules whose names contain this")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this time")
    parser.add_argument("--seconds", type=float, default=3.0, help="of cases per stage (3)")
    parser.add_argument(
        "--again", action="store_true", help="judge the unexplained survivors again"
    )
    parser.add_argument("--report", type=Path, help="write the record of all verdicts, no run")
    arguments = parser.parse_args(argv)
    root = Path.cwd()
    arguments.out.mkdir(parents=True, exist_ok=True)
    kept = arguments.out / "verdicts.jsonl"
    verdicts = read_verdicts(kept)
    modules = [p for p in sorted((root / "scheduler").glob("*.py")) if p.stem not in NOT_MUTATED]
    modules += [root / "runner" / f"{name}.py" for name in RUNNER_FILES]
    every = [
        mutant
        for path in modules
        if arguments.only in module_of(path, root)
        for mutant in mutants_of(path, root)
    ]
    reasons = load_reasons(root / "tests" / "data" / "surviving_mutants.json")
    if arguments.report is not None:
        known = [verdicts[mutant.key] for mutant in every if mutant.key in verdicts]
        arguments.report.write_text(report(len(every), known, reasons))
        return 0
    outcome = {
        key: "explained" if place_of(verdict) in reasons else verdict["stage"]
        for key, verdict in verdicts.items()
    }
    wanted = SURVIVED if arguments.again else None
    todo = [mutant for mutant in every if outcome.get(mutant.key) == wanted]
    # In random order, so that a run that is stopped early has judged a fair sample.
    random.Random(0).shuffle(todo)
    settings.register_profile(
        "mutation",
        max_examples=40,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    os.environ["HYPOTHESIS_PROFILE"] = "mutation"
    suite = load_suite(root, arguments.out)
    if todo:
        check_judge(todo[0], root, suite, arguments.seconds)
    end = time.monotonic() + 60 * arguments.minutes
    with kept.open("a", buffering=1) as file:
        for number, mutant in enumerate(todo, start=1):
            if time.monotonic() > end:
                break
            mutated = mutant.mutation.apply(source_of(mutant, root))
            stage, case = run_mutant(mutated, mutant, suite, arguments.seconds)
            file.write(json.dumps(mutant.verdict(stage, case)) + "\n")
            if stage == SURVIVED:
                line, change = mutant.mutation.line, mutant.mutation.change
                print(f"{number}/{len(todo)} {mutant.module}:{line} {change}", flush=True)
    return 0
