"""Mutants differ from their module in one place, and the judge tells good code from faulty."""

from pathlib import Path

import pytest

from segattn.benchmarks.mutation import Judge, load_traces, run_mutant
from segattn.benchmarks.mutations import mutations_of

ROOT = Path(__file__).parents[2]

SOURCE = '''
def clamp(value, low=0):
    """Docstring."""
    total = value + 1
    if value < low and not total:
        return low
    return value
'''


def test_every_mutant_of_a_small_function() -> None:
    changes = sorted(found.change.split(": ", 1)[1] for found in mutations_of(SOURCE))
    assert changes == [
        "0 -> 1",
        "1 -> 2",
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


@pytest.mark.parametrize(("old", "new", "stage"), [("", "", 0), (">=", ">", 1)])
def test_the_traces_notice_a_faulty_stop_test_and_pass_the_true_one(
    old: str, new: str, stage: int
) -> None:
    traces = load_traces([ROOT / "tests" / "data" / "traces" / "targeted.jsonl.gz"], 4)
    source = (ROOT / "scheduler" / "stop.py").read_text()
    mutant = source.replace(old, new) if old else source
    judged = run_mutant(mutant, "segattn.scheduler.stop", Judge(ROOT, traces, 1))
    assert judged == stage
