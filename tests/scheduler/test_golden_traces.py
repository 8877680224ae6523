"""Traces recorded from the real vLLM 0.33.0 scheduler, replayed field by field."""

from pathlib import Path

import pytest

from segattn.scheduler.testing.replay import replay
from segattn.scheduler.testing.trace_file import read_traces

TRACES = Path(__file__).parents[1] / "data" / "traces"


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("base", 240),
        ("async", 140),
        ("neuron", 200),
        ("neuron_async", 80),
        ("targeted", 15),
        ("new_rules", 54),
    ],
)
def test_every_decision_equals_the_recorded_one(name: str, count: int) -> None:
    traces = list(read_traces(TRACES / f"{name}.jsonl.gz"))
    different = {
        trace["id"]: str(difference)
        for trace in traces
        if (difference := replay(trace)) is not None
    }
    assert different == {}
    assert len(traces) == count


def test_the_shipped_policy_decides_what_the_shipped_scheduler_decided() -> None:
    # Recorded over vLLM 0.24. What differs: six lone requests with a threshold (R4), one reset that
    # is reported (R2), and four with sync drafts, whose blocks are hashed at the update.
    traces = list(read_traces(TRACES / "shipped_old.jsonl.gz"))
    different = {trace["seed"] for trace in traces if replay(trace) is not None}
    lone = {5004, 5018, 5040, 5044, 5072, 5122}
    assert different == lone | {5116} | {5026, 5090, 5094, 5132}
    assert len(traces) == 100


def test_the_newest_fork_differs_by_its_gate_and_its_second_schedule_too() -> None:
    traces = list(read_traces(TRACES / "shipped_new.jsonl.gz"))
    different = [trace for trace in traces if replay(trace) is not None]
    own = [t for t in different if t["info"]["fallbacks"] or t["info"]["gate_deferrals"]]
    assert (len(traces), len(different), len(own)) == (100, 19, 10)
