"""Waiting queues keep their order whatever is taken out of their middle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.scheduler import Request
from segattn.scheduler.config import POLICIES
from segattn.scheduler.request_queue import PriorityRequestQueue, create_request_queue

PRIORITIES = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def requests_of(priorities: list[int]) -> list[Request]:
    return [Request(f"r{n:02}", [5], 1, priority=p) for n, p in enumerate(priorities)]


@given(priorities=PRIORITIES, data=st.data())
def test_a_priority_queue_stays_in_order_when_requests_leave_its_middle(
    priorities: list[int], data: st.DataObject
) -> None:
    leaving = data.draw(st.lists(st.integers(0, len(priorities) - 1), unique=True))
    check_order_without(priorities, leaving)


def test_a_priority_queue_is_put_in_order_again_after_a_removal() -> None:
    check_order_without([0, 1, 5, 2, 3, 6, 7], [1])  # the rest of this heap is none: 5 before 3


@pytest.mark.parametrize("policy", POLICIES)
@given(priorities=PRIORITIES, data=st.data())
def test_a_queue_is_the_list_that_it_stands_for(
    policy: str, priorities: list[int], data: st.DataObject
) -> None:
    queue, expected = create_request_queue(policy), list[Request]()
    with pytest.raises(IndexError):
        queue.peek_request()
    for request in requests_of(priorities):
        at_head = data.draw(st.booleans())
        (queue.prepend_request if at_head else queue.add_request)(request)
        expected.insert(0 if at_head else len(expected), request)
        if policy == "priority":
            expected.sort(key=lambda each: (each.priority, each.request_id))
        if data.draw(st.integers(0, 2)) == 0:
            left = queue.pop_request()
            assert left is expected.pop(0)
            assert left not in queue
        assert (list(queue), len(queue), bool(queue)) == (expected, len(expected), bool(expected))
        assert all(each in queue for each in expected)
        assert not expected or queue.peek_request() is expected[0]
    for each in expected:
        assert queue.pop_request() is each
    with pytest.raises(IndexError):
        queue.pop_request()


def test_a_heap_forgets_requests_that_left_its_middle() -> None:
    queue = PriorityRequestQueue()
    requests = requests_of([0, *range(1, 500)])
    for request in requests:
        queue.add_request(request)
    queue.remove_requests(requests[10:])
    assert len(queue._heap) == 10
    queue.remove_requests(requests[1:10])
    assert len(queue._heap) == 10, "a few may stay: to forget them costs time"
    assert list(queue) == requests[:1]


def test_a_request_has_priority_0_unless_it_says_otherwise() -> None:
    queue = create_request_queue("priority")
    queue.add_request(Request("c", [5], 1, priority=1))
    queue.add_request(Request("b", [5], 1, priority=0))
    queue.add_request(Request("a", [5], 1))
    assert [request.request_id for request in queue] == ["a", "b", "c"]


def check_order_without(priorities: list[int], leaving: list[int]) -> None:
    requests = requests_of(priorities)
    queue = create_request_queue("priority")
    for request in requests:
        queue.add_request(request)
    queue.remove_requests([requests[number] for number in leaving])
    expected = sorted(
        (request for number, request in enumerate(requests) if number not in leaving),
        key=lambda request: (request.priority, request.request_id),
    )
    assert list(queue) == expected
    assert [queue.pop_request() for _ in expected] == expected
    assert not queue
