"""Traces recorded from the real vLLM 0.24.0 scheduler, replayed field by field."""

from pathlib import Path

import pytest

from segattn.scheduler.replay import replay
from segattn.scheduler.trace import read_traces

TRACES = Path(__file__).parents[1] / "data" / "traces"


@pytest.mark.parametrize(
    ("name", "count"),
    [("base", 240), ("async", 140), ("neuron", 200), ("neuron_async", 80), ("targeted", 16)],
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
