"""Requests that add_request refuses."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from segattn.scheduler import (
    AsyncScheduler,
    DraftTokenIds,
    ModelRunnerOutput,
    NeuronAsyncScheduler,
    NeuronScheduler,
    Request,
    RequestError,
    RequestStatus,
    Scheduler,
)
from segattn.tests.scheduler.base import add, make, names, update


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request("n", [], 1), "prompt_token_ids is empty"),
        (Request("n", [1], 0), "max_tokens=0"),
        (Request("n", [1], 1, min_tokens=-1), "min_tokens=-1"),
        (Request("n", [1], 1, arrival_time=float("nan")), "arrival_time=nan: must be a number"),
        (Request("n", [1, -2], 1), "token id -2: must be an integer within 0..2147483647"),
        (Request("n", [1, 2**31], 1), "token id 2147483648"),
        (Request("n", [1, 2**32], 1), "token id 4294967296: must be an integer within"),
        (Request("n", ["1"], 1), "token id '1'"),  # type: ignore[list-item] # what it refuses
        (Request("a", [1], 1), "not finished yet"),
    ],
)
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_bad_requests_are_refused_and_queue_nothing(
    request_: Request, reason: str, enable_prefix_caching: bool
) -> None:
    scheduler = make(enable_prefix_caching=enable_prefix_caching)
    a = add(scheduler, "a", 3)
    with pytest.raises(RequestError, match=reason) as caught:
        scheduler.add_request(request_)
    assert caught.value.request_id == request_.request_id
    assert str(caught.value) == f"request {request_.request_id!r}: {caught.value.reason}"
    assert names(scheduler.waiting) == ["a"]
    assert list(scheduler.requests.values()) == [a]
    scheduler.check_integrity()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("kind", [Scheduler, NeuronScheduler])
@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("request_id", 7, "request_id must be a string"),
        ("max_tokens", 1.5, "max_tokens=1.5: must be an integer"),
        ("max_tokens", None, "max_tokens=None: must be an integer"),
        ("max_tokens", True, "max_tokens=True: must be an integer"),
        ("min_tokens", "1", "min_tokens='1': must be an integer"),
        ("priority", None, "priority=None: must be an integer"),
        ("arrival_time", "now", "arrival_time='now': must be a number"),
        ("cache_salt", 5, "cache_salt=5: must be a string or None"),
        (
            "skip_reading_prefix_cache",
            "no",
            "skip_reading_prefix_cache='no': must be True or False",
        ),
        ("cache_salt", "\ud800", r"cache_salt='\ud800': must be Unicode"),
        ("prompt_token_ids", 5, "prompt_token_ids=5: must be a list of token ids"),
        ("stop_token_ids", None, "stop_token_ids=None: must be a list of token ids"),
        ("eos_token_id", "2", "stop token '2': must be an integer"),
        ("stop_token_ids", [2, None], "stop token None: must be an integer"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(
    field: str, value: Any, reason: str, kind: type[Scheduler], policy: str
) -> None:
    scheduler = make(kind, policy=policy)
    a = add(scheduler, "a", 3)
    given: dict[str, Any] = {"request_id": "n", "prompt_token_ids": [1], "max_tokens": 1}
    with pytest.raises(RequestError, match=re.escape(reason)):
        scheduler.add_request(Request(**given | {field: value}))
    assert list(scheduler.requests.values()) == [a]
    scheduler.check_integrity()


@pytest.mark.parametrize("kind", [Scheduler, NeuronScheduler])
def test_an_argument_of_another_kind_is_named(kind: type[Scheduler]) -> None:
    make_one: Any = kind
    make_neuron: Any = NeuronScheduler
    scheduler: Any = make(kind)
    add(scheduler, "a", 3)
    output = scheduler.schedule()
    drafts = DraftTokenIds(["a"], [[1]])
    calls: tuple[tuple[Callable[[], Any], str], ...] = (
        (lambda: make_one(None), "config=None: must be SchedulerConfig"),
        (lambda: make_neuron(scheduler.config, {}), "neuron_policy={}: must be NeuronPolicy"),
        (lambda: scheduler.add_request("b"), "request='b': must be Request"),
        (
            lambda: scheduler.finish_requests(5, RequestStatus.FINISHED_ABORTED),
            "request_ids=5: must be Iterable",
        ),
        (lambda: scheduler.update_from_output(None, None), "scheduler_output=None: must be Sched"),
        (
            lambda: scheduler.update_from_output(output, [7]),
            "model_runner_output=[7]: must be ModelRunnerOutput",
        ),
        (lambda: scheduler.update_draft_token_ids(None), "draft_token_ids=None: must be Draft"),
        (
            lambda: scheduler.update_draft_token_ids_in_output(drafts, None),
            "scheduler_output=None: must be SchedulerOutput",
        ),
    )
    for call, reason in calls:
        with pytest.raises(TypeError, match=re.escape(reason)):
            call()
    scheduler.check_integrity()
    update(scheduler, output, a=7)


def test_a_status_that_ends_nothing_is_refused() -> None:
    scheduler = make()
    add(scheduler, "a", 3)
    for status in (RequestStatus.RUNNING, "aborted"):
        with pytest.raises(ValueError, match=r"finished_status=.*: must be a finished status"):
            scheduler.finish_requests("a", status)  # type: ignore[arg-type]  # what it refuses
    assert names(scheduler.waiting) == ["a"]


def test_a_request_is_used_once() -> None:
    scheduler = make()
    request = add(scheduler, "a", 3)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    with pytest.raises(RequestError, match="used before, it is FINISHED_ABORTED"):
        scheduler.add_request(request)
    add(scheduler, "a", 3)


@pytest.mark.parametrize("kind", [NeuronScheduler, NeuronAsyncScheduler])
def test_drafts_for_which_no_blocks_are_kept_are_refused(kind: type[Scheduler]) -> None:
    scheduler = make(kind, num_speculative_tokens=1)
    requests = [add(scheduler, name, 3) for name in "ab"]
    for name in "ab":
        update(scheduler, scheduler.schedule(), **{name: 7})
    before = [request.spec_token_ids for request in requests]
    for tokens, reason in (
        ([[5], [5, 6]], r"draft_token_ids=\[5, 6\]: must be at most num_speculative_tokens=1"),
        ([[5]], "2 req_ids but 1 draft_token_ids"),
    ):
        with pytest.raises(ValueError, match=reason):
            scheduler.update_draft_token_ids(DraftTokenIds(["a", "b"], tokens))
    assert [request.spec_token_ids for request in requests] == before
    scheduler.update_draft_token_ids(DraftTokenIds(["a", "b"], [[5], []]))
    assert [request.spec_token_ids for request in requests] == [[5], []]


def test_the_tokens_that_a_step_with_drafts_samples_are_counted() -> None:
    scheduler = make(num_speculative_tokens=2)
    a = add(scheduler, "a", 3)
    update(scheduler, scheduler.schedule(), a=7)
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[8, 9]]))
    output = scheduler.schedule()
    with pytest.raises(ValueError, match="of 'a': must be 1 to 3 tokens"):
        scheduler.update_from_output(output, ModelRunnerOutput(["a"], [[8, 9, 10, 11]]))
    update(scheduler, output, a=[8, 9, 10])
    assert a.output_token_ids == [7, 8, 9, 10]


@pytest.mark.parametrize("kind", [Scheduler, NeuronAsyncScheduler])
@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([[7, 8], [7]], r"sampled_token_ids=\[7, 8\] of 'a': must be 1 to 1 tokens"),
        (
            [[7], [-1]],
            "sampled_token_ids of 'b': token id -1: must be an integer within 0..2147483647",
        ),
        ([[7], ["7"]], "sampled_token_ids of 'b': token id '7': must be an integer"),
        ([[7], [2.5]], "sampled_token_ids of 'b': token id 2.5: must be an integer"),
        ([[7], [2**31]], "sampled_token_ids of 'b': token id 2147483648: must be an integer"),
    ],
)
def test_an_output_of_something_else_than_the_sampled_tokens_is_refused(
    kind: type[Scheduler], tokens: list[list[Any]], reason: str
) -> None:
    scheduler = make(kind)
    requests = [add(scheduler, name, 3) for name in "ab"]
    output = scheduler.schedule()
    if kind is NeuronAsyncScheduler:  # which prefills them one by one
        update(scheduler, output, a=7)
        update(scheduler, scheduler.schedule(), b=7)
        output = scheduler.schedule()
    before = [request.output_token_ids.copy() for request in requests]
    with pytest.raises(ValueError, match=reason):
        scheduler.update_from_output(output, ModelRunnerOutput(["a", "b"], tokens))
    assert [request.output_token_ids for request in requests] == before
    update(scheduler, output, a=7, b=7)


@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler, NeuronScheduler, NeuronAsyncScheduler])
def test_a_token_before_the_prompt_is_computed_is_refused(kind: type[Scheduler]) -> None:
    scheduler = make(kind, max_num_batched_tokens=4)
    scheduler.add_request(Request("a", list(range(6)), 2))
    first = scheduler.schedule()
    # In flight at the same time, but for the one class that refuses it.
    last = None if kind is NeuronScheduler else scheduler.schedule()
    with pytest.raises(ValueError, match="must be empty, the step does not end its prompt"):
        scheduler.update_from_output(first, ModelRunnerOutput(["a"], [[7]]))
    scheduler.update_from_output(first, ModelRunnerOutput(["a"], [[]]))
    last = last or scheduler.schedule()
    (output,) = scheduler.update_from_output(last, ModelRunnerOutput(["a"], [[7]]))
    assert output.new_token_ids == [7]
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("req_ids", "tokens", "reason"),
    [
        (["a", "b"], [[7]], "2 req_ids but 1 sampled_token_ids"),
        (["a", "a"], [[7], [8]], r"req_ids=\['a', 'a'\]: must name each request once"),
        (["a", "b", "x"], [[7], [8], [9]], "has 'x': the step does not compute it"),
        (["b"], [[8]], "lacks 'a': must hold every request that samples"),
        (["a", "b"], [[7], []], r"sampled_token_ids=\[\] of 'b': must be 1 to 1 tokens"),
    ],
)
def test_an_output_of_other_requests_than_the_step_has_is_refused(
    req_ids: list[str], tokens: list[list[int]], reason: str
) -> None:
    scheduler = make()
    requests = [add(scheduler, name, 3) for name in "ab"]
    step = scheduler.schedule()
    with pytest.raises(ValueError, match=reason):
        scheduler.update_from_output(step, ModelRunnerOutput(req_ids, tokens))
    assert [request.output_token_ids for request in requests] == [[], []]
    # In any order, and a request that is gone may be missing.
    third = add(scheduler, "c", 3)
    scheduler.update_from_output(step, ModelRunnerOutput(["b", "a"], [[8], [7]]))
    assert [request.output_token_ids for request in requests] == [[7], [8]]
    step = scheduler.schedule()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scheduler.update_from_output(step, ModelRunnerOutput(["c", "b"], [[3], [9]]))
    assert [request.output_token_ids for request in (requests[1], third)] == [[8, 9], [3]]


def test_steps_come_back_in_order() -> None:
    scheduler = make(AsyncScheduler)
    a = add(scheduler, "a", 3)
    first, second = scheduler.schedule(), scheduler.schedule()
    tokens = ModelRunnerOutput(["a"], [[7]])
    with pytest.raises(ValueError, match="must be the oldest step in flight"):
        scheduler.update_from_output(second, tokens)
    assert a.output_token_ids == []
    for step in (first, second):
        scheduler.update_from_output(step, tokens)
    with pytest.raises(ValueError, match="must be the oldest step in flight"):
        scheduler.update_from_output(second, tokens)
    assert a.output_token_ids == [7, 7]


def test_a_step_without_work_brings_no_tokens() -> None:
    scheduler = make()
    step = scheduler.schedule()
    with pytest.raises(ValueError, match="has 'a': the step does not compute it"):
        scheduler.update_from_output(step, ModelRunnerOutput(["a"], [[7]]))
    assert scheduler.update_from_output(step, ModelRunnerOutput([], [])) == []


def test_a_flag_is_true_or_false() -> None:
    scheduler: Any = make()
    with pytest.raises(TypeError, match="reset_running_requests='no': must be bool"):
        scheduler.reset_prefix_cache("no")
