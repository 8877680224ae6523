"""Bugs that other schedulers had in public: preemption, resumes and tokens in flight.

Each test names where the bug was reported.
"""

from typing import Any

import pytest

from segattn.scheduler import (
    AsyncScheduler,
    Scheduler,
    SchedulerState,
)
from segattn.tests.scheduler.base import names
from segattn.tests.scheduler.engine import Engine, base, neuron, prompt

EVERY_BASE_KIND = pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])


@EVERY_BASE_KIND
def test_a_victim_that_was_scheduled_in_the_same_step_leaves_it(kind: type[Scheduler]) -> None:
    # vllm-project/vllm#23347, #28558
    scheduler = base(
        kind,
        policy="priority",
        num_blocks=6,
        max_num_batched_tokens=8,
        max_model_len=20,
        enable_prefix_caching=False,
    )
    engine = Engine(scheduler, depth=1)
    engine.add("low", prompt(8), 9, priority=5, arrival_time=0.0)
    engine.step()
    engine.add("high", prompt(8, 50), 9, priority=0, arrival_time=1.0)
    # low already takes the one free block, high is admitted with two, none is left for high.
    while scheduler.requests["high"].num_computed_tokens < 8:
        engine.step()
    low, high = scheduler.requests["low"], scheduler.requests["high"]
    for _ in range(9):
        output = engine.schedule()
        if output.preempted_req_ids:
            break
        engine.deliver()
    assert output.preempted_req_ids == {"low"}
    assert output.num_scheduled_tokens == {"high": 1}
    assert output.total_num_scheduled_tokens == 1
    assert output.scheduled_cached_reqs.req_ids == ["high"]
    assert (low.num_computed_tokens, low.block_ids) == (0, [])
    assert names(scheduler.running) == ["high"]
    assert names(scheduler.waiting) == ["low"]
    assert scheduler.num_free_blocks == 5 - len(high.block_ids)


def test_each_token_arrives_once_when_its_request_is_preempted_while_in_flight() -> None:
    # vllm-project/vllm#48245, #47900
    def run(kind: type[Scheduler], depth: int) -> tuple[dict[str, list[int]], int]:
        scheduler = base(
            kind, num_blocks=7, max_num_seqs=2, max_model_len=24, enable_prefix_caching=False
        )
        engine = Engine(scheduler, depth=depth)
        engine.add("first", prompt(4), 16)
        engine.add("r", prompt(4, 50), 12)
        num_preemptions = 0
        for _ in range(100):
            if not scheduler.has_requests():
                break
            num_preemptions += len(engine.schedule().preempted_req_ids)
            if len(engine._in_flight) >= depth:
                engine.deliver()
            for request in scheduler.requests.values():
                assert request.num_output_placeholders >= 0
        engine.drain()
        return engine.tokens, num_preemptions

    tokens, num_preemptions = run(AsyncScheduler, 2)
    assert num_preemptions > 0
    assert tokens == {"first": list(range(104, 120)), "r": list(range(104, 116))}
    assert tokens == run(Scheduler, 1)[0]


@pytest.mark.parametrize("discard", [True, False])
@pytest.mark.parametrize("layer", ["base", "neuron"])
def test_tokens_in_flight_at_a_reset_are_dropped_and_sampled_anew(
    layer: str, discard: bool
) -> None:
    # vllm-project/vllm#38624: the same kind, forced by reset_prefix_cache
    scheduler = base(AsyncScheduler) if layer == "base" else neuron(asynchronous=True)
    engine = Engine[Scheduler](scheduler, depth=2)
    engine.add("r", prompt(4), 5)
    engine.step()
    engine.step()
    if discard:
        scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run(30)
    assert engine.tokens == {"r": [104, 105, 106, 107, 108]}


@pytest.mark.parametrize("layer", ["base", "neuron"])
def test_no_decode_is_scheduled_beyond_max_tokens(layer: str) -> None:
    # vllm-project/vllm#27922
    scheduler = base(AsyncScheduler) if layer == "base" else neuron(asynchronous=True)
    engine = Engine[Scheduler](scheduler, depth=2)
    engine.add("r", prompt(4), 2)
    scheduled = [step for step in engine.run(10) if step]
    assert scheduled == [{"r": 4}, {"r": 1}]
    assert len(engine.tokens["r"]) == 2
    assert scheduler.num_free_blocks == 199


@pytest.mark.parametrize("layer", ["base", "neuron"])
def test_a_preempted_prompt_does_not_start_over_every_other_step(layer: str) -> None:
    # vllm-project/vllm#25538, #41951
    config: dict[str, Any] = {
        "num_blocks": 6,
        "max_num_batched_tokens": 5,
        "max_model_len": 20,
        "enable_prefix_caching": False,
    }
    scheduler = base(**config) if layer == "base" else neuron(**config)
    engine = Engine[Scheduler](scheduler)
    engine.add("r1", prompt(12), 5)
    while scheduler.requests["r1"].num_computed_tokens < 12:
        engine.step()
    engine.add("r2", prompt(12, 50), 1)
    preempted: list[str] = []
    for _ in range(30):
        if scheduler.has_requests():
            preempted += engine.schedule().preempted_req_ids
            engine.deliver()
    assert engine.finish_reasons == {"r1": "length", "r2": "length"}
    assert "r1" not in preempted
    if layer == "neuron":
        assert preempted == []


def test_the_second_chunk_of_a_resume_is_a_prefill_of_its_own() -> None:
    # tenstorrent/vllm#326
    scheduler = neuron(max_num_batched_tokens=8, enable_prefix_caching=False)
    engine = Engine(scheduler)
    engine.add("r", prompt(6), 20)
    for _ in range(4):
        engine.step()
    engine.add("other", prompt(4, 50), 20)
    engine.step()
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.requests["r"].num_tokens == 10
    for num_tokens in (8, 2):
        output = engine.schedule()
        assert output.num_scheduled_tokens == {"r": num_tokens}
        assert output.num_scheduled_tokens_padded == {"r": 8}
        assert scheduler.state is SchedulerState.ACTIVE_PREFILL
        engine.deliver()
    # Its logits are taken: the token after the recomputed ones continues the text.
    assert engine.tokens["r"][-1] == 100 + 10
