"""A step whose execution failed is taken back, also with another one in flight behind it."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segattn.scheduler import (
    AsyncScheduler,
    ModelRunnerOutput,
    NeuronAsyncScheduler,
    NeuronScheduler,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)
from segattn.tests.scheduler.base import add, make, names, update

KINDS = [Scheduler, AsyncScheduler, NeuronScheduler, NeuronAsyncScheduler]
LOST = OSError("device lost")


def sample(scheduler: Scheduler, output: SchedulerOutput) -> ModelRunnerOutput:
    """Each token is its own position, so a lost or repeated one shows."""
    requests = [scheduler.requests[name] for name in output.num_scheduled_tokens]
    tokens = [[] if r.is_prefill_chunk else [r.num_computed_tokens] for r in requests]
    return ModelRunnerOutput(list(output.num_scheduled_tokens), tokens)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_request_gets_the_tokens_of_a_clean_run(
    kind: type[Scheduler], data: st.DataObject
) -> None:
    draw = data.draw
    reserve = draw(st.booleans())
    num_blocks = draw(st.sampled_from([20, 40]))
    config = SchedulerConfig(4, 16, 48, 4, num_blocks, scheduler_reserve_full_isl=reserve)
    scheduler = kind(config)
    depth = 2 if kind.is_async else 1
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    tokens: dict[str, list[int]] = {}
    expected: dict[str, list[int]] = {}
    actions = draw(st.lists(st.sampled_from(["", "", "", "add", "abort", "fail"]), max_size=80))
    for number, action in enumerate(["add", *actions, *[""] * 200]):
        if action == "add":
            length, outputs = draw(st.integers(1, 24)), draw(st.integers(1, 8))
            prompt = [draw(st.integers(0, 1))] * 4 + [7] * length
            scheduler.add_request(Request(f"r{number}", prompt, outputs))
            expected[f"r{number}"] = [len(prompt) + i for i in range(outputs)]
        if action == "abort" and scheduler.requests:
            name = draw(st.sampled_from(sorted(scheduler.requests)))
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            del expected[name]
        if scheduler.has_requests():
            output = scheduler.schedule()
            in_flight.append((output, sample(scheduler, output)))
        if action == "fail":
            while in_flight:
                scheduler.step_failed(in_flight.pop()[0], LOST)
                scheduler.check_integrity()
        while len(in_flight) >= depth or (in_flight and not scheduler.has_requests()):
            for new in scheduler.update_from_output(*in_flight.popleft()):
                tokens.setdefault(new.request_id, []).extend(new.new_token_ids)
            scheduler.check_integrity()
    assert {name: tokens.get(name) for name in expected} == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_request_waits_again_and_its_blocks_are_not_found(kind: type[Scheduler]) -> None:
    scheduler = make(kind)
    request = add(scheduler, "a", 9)
    output = scheduler.schedule()
    scheduler.step_failed(output, LOST)
    assert (names(scheduler.waiting), request.status) == (["a"], RequestStatus.WAITING)
    assert (request.num_computed_tokens, request.num_output_placeholders) == (0, 0)
    assert scheduler.num_free_blocks == 32
    again = scheduler.schedule()
    assert [(new.req_id, new.num_computed_tokens) for new in again.scheduled_new_reqs] == [("a", 0)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_running_request_is_told_anew_with_its_whole_table(kind: type[Scheduler]) -> None:
    scheduler = make(kind)
    request = add(scheduler, "a", 8)
    update(scheduler, scheduler.schedule(), a=5)
    failed = scheduler.schedule()
    assert failed.step_kind == "decode"
    scheduler.step_failed(failed, LOST)
    assert (request.num_computed_tokens, len(request.block_ids)) == (8, 2)
    cached = scheduler.schedule().scheduled_cached_reqs
    assert (cached.req_ids, cached.resumed_req_ids) == (["a"], {"a"})
    assert cached.num_computed_tokens == [8]
    assert cached.new_block_ids == [(request.block_ids,)]
    assert cached.all_token_ids == {"a": [*request.prompt_token_ids, 5]}


def test_what_the_failed_step_reported_is_reported_again() -> None:
    scheduler = make()
    add(scheduler, "a", 8)
    add(scheduler, "b", 8)
    scheduler.schedule()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    failed = scheduler.schedule()
    assert failed.finished_req_ids == {"a"}
    scheduler.step_failed(failed, LOST)
    assert scheduler.schedule().finished_req_ids == {"a"}


def test_blocks_of_a_request_that_was_aborted_meanwhile_are_not_found() -> None:
    scheduler = make()
    add(scheduler, "a", [1] * 9)
    failed = scheduler.schedule()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scheduler.step_failed(failed, LOST)
    add(scheduler, "b", [1] * 9)
    assert scheduler.schedule().scheduled_new_reqs[0].num_computed_tokens == 0


def test_only_the_newest_step_in_flight_can_fail() -> None:
    scheduler = make(AsyncScheduler)
    add(scheduler, "a", 8)
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(ValueError, match="newest step in flight"):
        scheduler.step_failed(first, LOST)
    scheduler.step_failed(second, LOST)
    scheduler.step_failed(first, LOST)
    assert names(scheduler.waiting) == ["a"]
    with pytest.raises(ValueError, match="newest step in flight"):
        scheduler.step_failed(first, LOST)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Scheduler, ["prefill", "mixed", "decode", "empty"]),
        (NeuronScheduler, ["prefill", "prefill", "decode", "empty"]),
    ],
)
def test_a_step_tells_its_kind(kind: type[Scheduler], expected: list[str]) -> None:
    scheduler = make(kind)
    add(scheduler, "a", 8, max_tokens=3)
    kinds = []
    for number in range(3):
        output = scheduler.schedule()
        kinds.append(output.step_kind)
        update(scheduler, output, **dict.fromkeys(output.num_scheduled_tokens, 1))
        if number == 0:
            add(scheduler, "b", 8, max_tokens=2)
    scheduler.finish_requests(["a", "b"], RequestStatus.FINISHED_ABORTED)
    assert [*kinds, scheduler.schedule().step_kind] == expected
