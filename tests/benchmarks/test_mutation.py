"""Mutants differ from their module in one place, and the judge tells good code from faulty."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from segattn.scheduler.testing.replay import replay
from segattn.scheduler.testing.trace_file import read_traces
from segattn.tests.checks.mutation import command as mutation
from segattn.tests.checks.mutation.cases import STAGES, Case, LineRecorder, Suite
from segattn.tests.checks.mutation.command import MutantFinder, mutants_of, run_mutant
from segattn.tests.checks.mutation.mutants import mutations_of
from segattn.tests.checks.mutation.report import SURVIVED, report

ROOT = Path(__file__).parents[2]

SOURCE = '''
LIMIT = 7

def clamp(value, low=0):
    """Docstring."""
    total = value + 1
    if value < low and not total:
        return low
    return value
'''


def changes() -> dict[str, Any]:
    return {found.change.split(": ", 1)[1]: found for found in mutations_of(SOURCE)}


def test_every_mutant_of_a_small_function() -> None:
    assert sorted(changes()) == [
        "0 -> 1",
        "1 -> 2",
        "7 -> 8",
        "Add -> Sub",
        "Lt -> LtE",
        "and <-> or",
        "not removed",
        "without `return low`",
        "without `return value`",
        "without `total = value + 1`",
    ]


def test_each_mutant_differs_from_the_module_and_from_the_others() -> None:
    sources = [mutation.apply(SOURCE) for mutation in mutations_of(SOURCE)]
    assert len({*sources, SOURCE}) == len(sources) + 1


def test_a_mutation_knows_the_lines_that_reach_it() -> None:
    lines = {change: list(found.place.lines) for change, found in changes().items()}
    assert lines["Add -> Sub"] == [6]
    assert lines["Lt -> LtE"] == [7]  # the header, not what it guards
    assert lines["without `return low`"] == [8]
    assert lines["0 -> 1"] == [4, 5, 6, 7, 8, 9]  # a default serves the whole function
    assert lines["7 -> 8"] == []  # evaluated on import


def test_equal_changes_of_one_function_have_keys_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("def f(a):\n    return a + 1 + 1\n")
    keys = [mutant.key for mutant in mutants_of(tmp_path / "module.py", tmp_path)]
    assert len(set(keys)) == len(keys) == 5


@pytest.fixture(scope="module")
def suite() -> Suite:
    """Some targeted traces, and one unit test."""
    traces = list(read_traces(ROOT / "tests" / "data" / "traces" / "targeted.jsonl.gz"))[::4]
    recorder = LineRecorder()
    found = Suite(ROOT, traces={trace["id"]: trace for trace in traces})
    for trace in traces:
        recorder.start()
        assert replay(trace) is None
        found.cases.append(recorder.stop(STAGES[0], trace["id"]))
    recorder.start()
    test = "tests/scheduler/test_stop_rules.py::test_only_a_finished_status_finishes"
    found.cases.append(Case(STAGES[2], test, 0.1, {"scheduler.scheduler": list(range(1, 300))}))
    recorder.stop("", "")
    # Reaches any line.
    test = "test_failed_steps.py::test_a_step_that_fails_again_ends_its_requests_alone[sync]"
    found.cases.append(Case(STAGES[3], f"tests/runner/{test}", 1.0, {}))
    return found


def judged(suite: Suite, module: str, old: str, new: str) -> tuple[str, str]:
    """Stage and case that notice a change of a module's text."""
    path = ROOT / "scheduler" / f"{module}.py"
    source = path.read_text()
    assert old in source
    mutant = next(
        mutant
        for mutant in mutants_of(path, ROOT)
        if mutant.mutation.line == source[: source.index(old)].count("\n") + 1
    )
    return run_mutant(source.replace(old, new), mutant, suite, 60.0)


@pytest.mark.parametrize(
    ("module", "old", "new", "stage"),
    [
        ("stop", ">= request.max_num", "> request.max_num", STAGES[0]),
        ("stop", ">= request.max_num", ">= request.max_num", SURVIVED),
        ("scheduler", "raise ValueError(f", "print(f", STAGES[2]),
    ],
)
def test_a_mutant_is_noticed_by_the_first_stage_that_reaches_it(
    suite: Suite, module: str, old: str, new: str, stage: str
) -> None:
    assert judged(suite, module, old, new)[0] == stage


def test_a_failed_step_notices_what_nothing_else_reaches(suite: Suite) -> None:
    stage, case = judged(suite, "recovery", "steps_in_flight.remove(step)", "steps_in_flight.gone")
    assert (stage, case) == (STAGES[3], suite.cases[-1].name)


def test_a_mutant_that_never_ends_is_noticed(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutation, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(mutation, "SLOWDOWN", 5.0)
    test = "if request.output_token_ids[-1] in"
    stage, case = judged(suite, "stop", test, f"while True:\n        pass\n    {test}")
    assert stage == STAGES[0]
    assert case.endswith("(no end)")


def test_the_traces_say_which_lines_they_execute(suite: Suite) -> None:
    source = (ROOT / "scheduler" / "stop.py").read_text().splitlines()
    line = next(n for n, text in enumerate(source, 1) if "FINISHED_LENGTH_CAPPED" in text)
    reaching = [
        case.name
        for case in suite.cases
        if case.stage == STAGES[0] and case.reaches("scheduler.stop", range(line, line + 1))
    ]
    by_hand = [
        name
        for name, trace in suite.traces.items()
        if any(
            entry[1] == "FINISHED_LENGTH_CAPPED"
            for event in trace["events"]
            if event[0] == "update"
            for entry in event[3].get("finished", [])
        )
    ]
    assert reaching == by_hand != []


def test_other_modules_are_none_of_the_finders_business() -> None:
    finder = MutantFinder("segattn.scheduler.stop", "")
    assert finder.find_spec("segattn.scheduler.step", None) is None
    assert finder.find_spec("segattn.scheduler.stop", None) is not None


def test_the_record_counts_stages_and_explains_survivors() -> None:
    found = {"file": "a.py", "function": "f", "change": "x: 0 -> 1"}
    verdicts = [
        found | {"stage": STAGES[0], "case": "one"},
        found | {"stage": STAGES[2], "case": "two (no end)"},
        found | {"stage": SURVIVED, "case": ""},
        found | {"stage": SURVIVED, "case": "", "change": "y: 0 -> 1"},
    ]
    page = report(5, verdicts, {("a.py", "f", "x: 0 -> 1"): "because"})
    assert "4 of 5 mutants were judged: 2 are noticed** (1 because they never end), 2 surv" in page
    assert "| a.py | 4 | 1 | 0 | 1 | 0 | 0 | 2 |" in page
    assert "| a.py | `f` | `x: 0 -> 1` | because |" in page
    assert "| a.py | `f` | `y: 0 -> 1` | **open** |" in page


def test_pytest_starts_after_the_runs_of_the_fuzzer_are_recorded(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path

import pytest

from segattn.tests.checks.mutation.cases import fuzzer_runs

assert fuzzer_runs(Path(sys.argv[1]), ["base"], 1)
warning = "error::hypothesis.errors.HypothesisSideeffectWarning"
raise SystemExit(pytest.main(["-W", warning, "--collect-only", "-q", sys.argv[2]]))
"""
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    command = [sys.executable, "-c", code, str(tmp_path / "runs.jsonl.gz"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
