"""Requests that add_request refuses."""

import pytest

from segattn.scheduler import Request, RequestError, RequestStatus
from segattn.tests.scheduler.base import add, make, names


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request("n", [], 1), "prompt_token_ids is empty"),
        (Request("n", [1], 0), "max_tokens=0"),
        (Request("n", [1], 1, min_tokens=-1), "min_tokens=-1"),
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


def test_a_request_is_used_once() -> None:
    scheduler = make()
    request = add(scheduler, "a", 3)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    with pytest.raises(RequestError, match="used before, it is FINISHED_ABORTED"):
        scheduler.add_request(request)
    add(scheduler, "a", 3)
