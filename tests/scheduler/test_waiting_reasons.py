"""Every waiting request is counted in every step, under the reason that is shown for it."""

from collections import Counter
from itertools import islice

import pytest

from segattn.scheduler import Admission, NeuronScheduler, PauseState, Scheduler
from segattn.scheduler.testing.trace import TraceDriver, make_scheduler
from segattn.scheduler.testing.trace_file import read_traces
from segattn.tests.scheduler.base import add, make
from segattn.tests.scheduler.test_golden_traces import TRACES

EVERYWHERE = {"behind", "kv_blocks", "max_num_seqs"}
NEURON = EVERYWHERE | {"prefill_batch", "prefill_running"}
BASE = EVERYWHERE | {"preemption", "token_budget"}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("base", BASE), ("async", BASE), ("neuron", NEURON), ("neuron_async", NEURON)],
)
def test_counts_are_sums_of_what_is_shown(kind: str, expected: set[str]) -> None:
    seen: set[Admission] = set()
    for trace in islice(read_traces(TRACES / f"{kind}.jsonl.gz"), 0, None, 8):
        driver = TraceDriver(make_scheduler(kind, trace["config"]))
        scheduler = driver.scheduler
        for event in trace["events"]:
            before = dict(scheduler.admission_counts)
            driver.apply(event)
            if event[0] == "schedule":
                shown = Counter(scheduler.waiting_reasons().values())
                counted = {
                    reason: count - before[reason]
                    for reason, count in scheduler.admission_counts.items()
                    if count > before[reason]
                }
                assert counted == shown
                assert set(scheduler.waiting_reasons()) == {
                    request.request_id for request in scheduler.waiting
                }
                seen |= set(shown)
    assert {reason.value for reason in seen} >= expected


@pytest.mark.parametrize("kind", [Scheduler, NeuronScheduler])
def test_a_request_that_no_step_has_looked_at_was_not_scheduled(kind: type[Scheduler]) -> None:
    scheduler = make(kind)
    for name in "ab":
        add(scheduler, name, 3)
    assert set(scheduler.waiting_reasons().values()) == {Admission.NOT_SCHEDULED}
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    scheduler.schedule()
    assert scheduler.waiting_reasons()["a"] is Admission.PAUSED
    assert scheduler.waiting_reasons()["b"] is Admission.BEHIND
