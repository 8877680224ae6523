"""Waiting queues keep their order whatever is taken out of their middle."""

from hypothesis import given
from hypothesis import strategies as st

from segattn.scheduler import Request
from segattn.scheduler.request_queue import create_request_queue

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
