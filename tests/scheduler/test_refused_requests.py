"""Requests that add_request refuses."""

import re
from typing import Any

import pytest

from segattn.scheduler import NeuronScheduler, Request, RequestError, RequestStatus, Scheduler
from segattn.tests.scheduler.base import add, make, names


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request("n", [], 1), "prompt_token_ids is empty"),
        (Request("n", [1], 0), "max_tokens=0"),
        (Request("n", [1], 1, min_tokens=-1), "min_tokens=-1"),
        (Request("n", [1], 1, arrival_time=float("nan")), "arrival_time=nan: must be a number"),
        (Request("n", [1, -2], 1), "must be integers within 0..2147483647"),
        (Request("n", [1, 2**31], 1), "token id 2147483648"),
        (Request("n", [1, 2**32], 1), "must be integers within 0..2147483647"),
        (Request("n", ["1"], 1), "must be integers"),  # type: ignore[list-item] # what it refuses
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
        ("min_tokens", "1", "min_tokens='1': must be an integer"),
        ("priority", None, "priority=None: must be an integer"),
        ("arrival_time", "now", "arrival_time='now': must be a number"),
        ("cache_salt", 5, "cache_salt=5: must be a string or None"),
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
