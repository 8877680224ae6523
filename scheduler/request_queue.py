"""Queues of waiting requests, first come first served or by priority."""

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator

from .request import Request


class RequestQueue(ABC):
    """Waiting requests in the order of their policy; names as in vLLM."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Queue a request that came last."""

    @abstractmethod
    def prepend_request(self, request: Request) -> None:
        """Queue a request that was already in its turn."""

    @abstractmethod
    def peek_request(self) -> Request:
        """The request whose turn it is. IndexError when the queue is empty."""

    @abstractmethod
    def pop_request(self) -> Request:
        """Remove and return the request whose turn it is. IndexError when the queue is empty."""

    @abstractmethod
    def remove_request(self, request: Request) -> None:
        """Remove `request`. ValueError when it is not in the queue."""

    @abstractmethod
    def without(self, requests: Collection[Request]) -> "RequestQueue":
        """A new queue with all but `requests`, in the same order."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Requests in the order of their turn."""


class FCFSRequestQueue(deque[Request], RequestQueue):
    """First come, first served."""

    def add_request(self, request: Request) -> None:
        """Queue a request at the end."""
        self.append(request)

    def prepend_request(self, request: Request) -> None:
        """Queue a request at the head: a preempted one runs again before newcomers."""
        self.appendleft(request)

    def peek_request(self) -> Request:
        """The request at the head. IndexError when the queue is empty."""
        return self[0]

    def pop_request(self) -> Request:
        """Remove and return the request at the head. IndexError when the queue is empty."""
        return self.popleft()

    def remove_request(self, request: Request) -> None:
        """Remove `request` in linear time. ValueError when it is not in the queue."""
        self.remove(request)

    def without(self, requests: Collection[Request]) -> "FCFSRequestQueue":
        """A new queue with all but `requests`, in the same order."""
        return FCFSRequestQueue(request for request in self if request not in requests)


class PriorityRequestQueue(RequestQueue):
    """Smaller priority first, then earlier arrival, then smaller id; no one can jump the queue."""

    def __init__(self) -> None:
        # Ids are unique, so the comparison of two entries never reaches the requests.
        self._heap: list[tuple[int, float, str, Request]] = []

    def add_request(self, request: Request) -> None:
        """Queue a request at the place its priority, arrival and id give it."""
        heapq.heappush(
            self._heap, (request.priority, request.arrival_time, request.request_id, request)
        )

    def prepend_request(self, request: Request) -> None:
        """Same as `add_request`: having been in its turn gives no precedence, as in vLLM."""
        self.add_request(request)

    def peek_request(self) -> Request:
        """The request that sorts first. IndexError when the queue is empty."""
        return self._heap[0][-1]

    def pop_request(self) -> Request:
        """Remove and return the request that sorts first. IndexError when the queue is empty."""
        return heapq.heappop(self._heap)[-1]

    def remove_request(self, request: Request) -> None:
        """Remove `request` in linear time. ValueError when it is not in the queue."""
        del self._heap[[entry[-1] for entry in self._heap].index(request)]
        heapq.heapify(self._heap)

    def without(self, requests: Collection[Request]) -> "PriorityRequestQueue":
        """A new queue with all but `requests`, in the same order."""
        queue = PriorityRequestQueue()
        queue._heap = [entry for entry in self._heap if entry[-1] not in requests]
        heapq.heapify(queue._heap)
        return queue

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        """Requests in the order of their turn; sorts a copy, the heap stays as it is."""
        return (entry[-1] for entry in sorted(self._heap))


def create_request_queue(policy: str) -> RequestQueue:
    """An empty queue of policy "fcfs" or "priority"."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
