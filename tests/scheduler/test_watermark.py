"""The watermark under the Neuron rules: nobody is admitted whom the base then refuses."""

from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segattn.scheduler import NeuronPolicy
from segattn.scheduler.testing.compare import Comparison
from segattn.scheduler.testing.strategies import requests
from segattn.scheduler.testing.subject import Subject
from segattn.tests.scheduler.engine import Engine, neuron, prompt

KvAdmission = Literal["shared", "reserved", "worst_case"]
ADMISSIONS = pytest.mark.parametrize("admission", ["shared", "reserved", "worst_case"])


@ADMISSIONS
@pytest.mark.parametrize("kind", ["neuron", "neuron_async"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_step_is_lost_to_a_request_that_the_watermark_keeps_out(
    kind: str, admission: KvAdmission, data: st.DataObject
) -> None:
    config: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": data.draw(st.integers(4, 12)),
        "max_model_len": 17,
        "block_size": data.draw(st.integers(2, 4)),
        "watermark": data.draw(st.floats(0.0, 1.0)),
        "scheduler_reserve_full_isl": data.draw(st.booleans()),
    }
    fewest = 1 + -(-17 // config["block_size"])
    config["num_blocks"] = data.draw(st.integers(fewest, 4 * fewest))
    # A comparison with the model demands work of each step while requests are left.
    judge = Comparison(Subject.own(kind), config, {"kv_admission": admission})
    num_requests = data.draw(st.integers(1, 6))
    for step in range(200):
        if step < num_requests:
            judge.apply(["add", data.draw(requests(16, 17, f"r{step}", step))])
        while len(judge.pending) == judge.subject.depth or (judge.pending and judge.is_idle()):
            oldest = min(judge.pending)
            rows = [[name, [] if is_chunk else [5]] for name, is_chunk, _ in judge.pending[oldest]]
            judge.apply(["update", oldest, rows])
        if judge.is_idle() and step >= num_requests:
            break
        judge.apply(["schedule", step])
    assert judge.is_idle()


@pytest.mark.parametrize(("admission", "most"), [("shared", 2), ("reserved", 2), ("worst_case", 1)])
def test_the_watermark_stays_free_beside_all_that_requests_can_need(
    admission: KvAdmission, most: int
) -> None:
    # 15 usable blocks, of which 4 stay free. Each request has 5 blocks in the end and could have 8.
    scheduler = neuron(
        NeuronPolicy(admission), num_blocks=16, max_model_len=32, watermark=0.25, max_num_seqs=4
    )
    engine = Engine(scheduler, depth=1)
    for name in "ABCD":
        engine.add(name, prompt(4, 10 * ord(name)), 16)
    num_running, steps = 0, []
    while scheduler.has_requests():
        steps.append(engine.step())
        num_running = max(num_running, len(scheduler.running))
    assert num_running == most
    # The last step reports who finished.
    assert all(steps[:-1])
