"""What mutants are judged by: cases, with the lines that each of them executes.

A case is a recorded trace of vLLM, a run of the fuzzer, one test, or the exploration of one small
configuration. The lines are recorded once, on the true code, so that a mutant needs to pass
only the cases that reach it.
"""

import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import segattn.scheduler
from segattn.reference.extras import MissingExtraError
from segattn.reference.scheduler_state import NeuronRules
from segattn.scheduler.testing import KINDS, Subject
from segattn.scheduler.testing.explore_command import POLICIES, Size, worlds
from segattn.scheduler.testing.explorer import World, explore
from segattn.scheduler.testing.fuzzing import run_round
from segattn.scheduler.testing.machine import Campaign, machine
from segattn.scheduler.testing.replay import replay
from segattn.scheduler.testing.trace import TraceDriver, make_scheduler
from segattn.scheduler.testing.trace_file import read_traces, write_traces
from segattn.scheduler.testing.trial import failure_of

try:
    import pytest
except ModuleNotFoundError as error:
    raise MissingExtraError("pytest", "test") from error

STAGES = ("traces", "fuzzer", "unit tests", "tests of failed steps", "exploration")
FOLDERS = ("scheduler", "runner")
"""Whose lines are recorded."""
FAILED_STEPS = ("test_interrupted_calls.py", "runner/test_failed_steps.py")
"""Tests that fail a step at each of its calls. They trace lines themselves, which leaves none to
the recorder."""
NO_CASES = {
    "test_golden_traces.py": "each of the traces is a case",
    "test_cost_and_memory.py": "measures memory, of which the recorder itself takes some",
}
RUNNER_TESTS = (
    "async_engine", "engine", "failed_steps", "followed_output", "model_runner", "padding",
)  # fmt: skip
"""Those of the runner's own files; the others serve real models."""
FUZZ_ROUNDS = 4
WORLD_SIZE, WORLD_STEP = Size(2, 3, 2), 60
"""Every so many configurations of this size are explored."""


@dataclass(frozen=True)
class Case:
    """One thing to pass; lines: those of each module of the scheduler that it executes."""

    stage: str
    name: str
    seconds: float
    lines: dict[str, list[int]]

    def reaches(self, module: str, lines: range) -> bool:
        """Whether the case executes one of `lines`; no lines are those of the import.

        A case without lines traces them itself, so it may execute any.
        """
        reached = self.lines.get(module, ())
        return not (lines and self.lines) or any(line in lines for line in reached)


@dataclass
class Suite:
    """All cases, and the traces and configurations that they name."""

    root: Path
    cases: list[Case] = field(default_factory=list)
    traces: dict[str, dict[str, Any]] = field(default_factory=dict)

    def reaching(self, stage: str, module: str, lines: range, seconds: float) -> list[Case]:
        """Cases of a stage that reach the lines, the fast ones first, of so many seconds in all."""
        chosen: list[Case] = []
        total = 0.0
        for case in self.cases:  # sorted by their time
            if case.stage == stage and case.reaches(module, lines):
                total += case.seconds
                if chosen and total > seconds:
                    break
                chosen.append(case)
        return chosen


class LineRecorder:
    """Notes which lines of the scheduler are executed."""

    def __init__(self) -> None:
        self._root = Path(segattn.scheduler.__file__).parents[1]
        self._folders = tuple(f"{self._root / name}/" for name in FOLDERS)
        self._left: dict[CodeType, set[int]] = {}
        """Lines of each entered function that were not reached; none left: it runs untraced."""
        self._begin = 0.0

    def start(self) -> None:
        """Begin anew."""
        self._left = {}
        self._begin = time.process_time()
        sys.settrace(self._trace_call)

    def stop(self, stage: str, name: str) -> Case:
        """The case that ran since `start`."""
        sys.settrace(None)
        seconds = time.process_time() - self._begin
        lines: dict[str, set[int]] = {}
        for code, left in self._left.items():
            reached = _lines_of(code) - left
            module = module_of(Path(code.co_filename), self._root)
            lines.setdefault(module, set()).update(reached)
        return Case(stage, name, round(seconds, 4), {key: sorted(lines[key]) for key in lines})

    def _trace_call(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        left = self._left.get(code)
        if left is None:
            # The kit judges schedulers, it is none.
            path = code.co_filename
            if not path.startswith(self._folders) or "/scheduler/testing/" in path:
                return None
            left = self._left[code] = _lines_of(code) - {code.co_firstlineno}
        return self._trace_line if left else None

    def _trace_line(self, frame: FrameType, event: str, argument: object) -> Any:
        left = self._left[frame.f_code]
        left.discard(frame.f_lineno)
        return self._trace_line if left else None


def module_of(path: Path, root: Path) -> str:
    """Such as scheduler.step."""
    return ".".join(path.relative_to(root).with_suffix("").parts)


def _lines_of(code: CodeType) -> set[int]:
    return {line for _, _, line in code.co_lines() if line is not None}


class TestRecorder:
    """A pytest plugin that records each test as a case."""

    __test__ = False

    def __init__(self, recorder: LineRecorder) -> None:
        self.cases: list[Case] = []
        self._recorder = recorder

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Record the lines of one test."""
        self._recorder.start()
        yield
        fails_steps = any(name in item.nodeid for name in FAILED_STEPS)
        case = self._recorder.stop(STAGES[3] if fails_steps else STAGES[2], item.nodeid)
        self.cases.append(replace(case, lines={}) if fails_steps else case)


def explored_worlds() -> list[World]:
    """The configurations that mutants are explored in."""
    return list(islice(worlds(WORLD_SIZE, POLICIES["default"]), 0, None, WORLD_STEP))


def passes_run(trace: dict[str, Any]) -> bool:
    """Whether a run of the fuzzer keeps the rules, or goes as it did and with integrity."""
    if trace["judge"] == "invariants":
        parts = trace["config"], trace["policy"], trace["events"], trace["judge"]
        return failure_of(Subject.own(trace["kind"]), *parts) is None
    driver = TraceDriver(make_scheduler(trace["kind"], trace["config"], trace["policy"]))
    for event in trace["events"]:
        if driver.apply(event) != event:
            return False
        driver.scheduler.check_integrity()
    return True


def passes(case: Case, suite: Suite) -> bool:
    """Whether the scheduler passes a case that is no test. Raises what a faulty one raises."""
    if case.stage == STAGES[4]:
        return explore(explored_worlds()[int(case.name)]).violation is None
    trace = suite.traces[case.name]
    return passes_run(trace) if case.stage == STAGES[1] else replay(trace) is None


def pytest_options(root: Path) -> list[str]:
    """For tests that mutants run: silent, without files, and stopping at the first failure."""
    # Modules that the process has imported before are no news.
    known = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return ["-x", "-q", "-p", "no:cacheprovider", *known, "--rootdir", str(root)]


def unit_tests(root: Path) -> list[Path]:
    """Test files that hold cases."""
    tests = (root / "tests" / "scheduler").glob("test_*.py")
    own = sorted(path for path in tests if path.name not in NO_CASES)
    return [*own, *(root / "tests" / "runner" / f"test_{name}.py" for name in RUNNER_TESTS)]


def fuzzer_runs(
    path: Path, kinds: Sequence[str] = tuple(KINDS), rounds: int = FUZZ_ROUNDS
) -> list[dict[str, Any]]:
    """Runs of the fuzzer: those kept at `path`, which is written if it does not exist.

    Rounds are counted per scheduler kind and policy.
    """
    if not path.exists():
        # In a process of its own: Hypothesis wants to have drawn nothing before pytest loads it.
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            process.submit(_write_fuzzer_runs, path, kinds, rounds).result()
    return list(read_traces(path))


def _write_fuzzer_runs(path: Path, kinds: Sequence[str], rounds: int) -> None:
    documented = asdict(NeuronRules.documented())
    variants: list[tuple[str, dict[str, Any]]] = [(kind, {}) for kind in kinds]
    variants += [(kind, documented) for kind in kinds if "neuron" in kind]
    campaigns = [
        *(Campaign(Subject.own(kind), "model", {}, policy, True) for kind, policy in variants),
        *(Campaign(Subject.own(kind), keeps_runs=True) for kind in kinds),
    ]
    runs: list[dict[str, Any]] = []
    for campaign in campaigns:
        for number in range(rounds):
            run_round(machine(campaign), number)
        runs += campaign.runs
    write_traces(path, runs)


def load_suite(root: Path, folder: Path) -> Suite:
    """The suite of the scheduler as it is; `folder` keeps what takes long to record.

    Cases are recorded anew when the scheduler or the tests have changed.
    """
    suite = Suite(root)
    for path in sorted((root / "tests" / "data" / "traces").glob("*.jsonl.gz")):
        suite.traces |= {
            f"{path.stem} {trace['id']}": trace
            for trace in read_traces(path)
            # Rules of vLLM changed since the shipped classes were recorded over 0.24.
            if "source" not in trace or replay(trace) is None
        }
    golden = list(suite.traces)
    runs = fuzzer_runs(folder / "fuzzer.jsonl.gz")
    suite.traces |= {f"run {number}": trace for number, trace in enumerate(runs)}
    package = [path for name in FOLDERS for path in sorted((root / name).glob("*.py"))]
    recorded = [
        _cached(
            folder / "traces.json",
            package,
            lambda: _record_others(suite, golden, [n for n in suite.traces if n not in golden]),
        ),
        _cached(folder / "tests.json", [*package, *unit_tests(root)], lambda: _record_tests(root)),
    ]
    suite.cases = sorted(chain(*recorded), key=lambda case: case.seconds)
    gc.collect()
    gc.freeze()  # pages that no collector touches stay shared with the forked processes
    return suite


def _cached(path: Path, inputs: Sequence[Path], record: Any) -> list[Case]:
    digest = sha256(b"\0".join(file.read_bytes() for file in inputs)).hexdigest()
    if path.exists():
        known = json.loads(path.read_text())
        if known["digest"] == digest:
            return [Case(**case) for case in known["cases"]]
    cases: list[Case] = record()
    path.write_text(json.dumps({"digest": digest, "cases": [asdict(case) for case in cases]}))
    return cases


def _record_others(suite: Suite, golden: Sequence[str], runs: Sequence[str]) -> list[Case]:
    recorder = LineRecorder()
    names = [(STAGES[0], name) for name in golden] + [(STAGES[1], name) for name in runs]
    names += [(STAGES[4], str(number)) for number in range(len(explored_worlds()))]
    cases = []
    for stage, name in names:
        recorder.start()
        passed = passes(Case(stage, name, 0.0, {}), suite)
        cases.append(recorder.stop(stage, name))
        if not passed:
            raise AssertionError(f"{stage} {name}: fails without any mutation")
    return cases


def _record_tests(root: Path) -> list[Case]:
    plugin = TestRecorder(LineRecorder())
    if pytest.main([*pytest_options(root), *map(str, unit_tests(root))], [plugin]) != 0:
        raise AssertionError("the tests fail without any mutation")
    return plugin.cases
