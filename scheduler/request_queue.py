"""Queues of waiting requests, first come first served or by priority."""

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator

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
    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove requests, each in constant time. KeyError when one is not in the queue."""

    @abstractmethod
    def __contains__(self, request: Request) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Requests in the order of their turn."""


class FCFSRequestQueue(RequestQueue):
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add_request(self, request: Request) -> None:
        """Queue a request at the end."""
        self._requests[request.request_id] = request

    def prepend_request(self, request: Request) -> None:
        """Queue a request at the head: a preempted one runs again before newcomers."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek_request(self) -> Request:
        """The request at the head. IndexError when the queue is empty."""
        for request in self._requests.values():
            return request
        raise IndexError("the queue is empty")

    def pop_request(self) -> Request:
        """Remove and return the request at the head. IndexError when the queue is empty."""
        if not self._requests:
            raise IndexError("the queue is empty")
        return self._requests.popitem(last=False)[1]

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove requests, each in constant time. KeyError when one is not in the queue."""
        for request in requests:
            del self._requests[request.request_id]

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Requests in the order of their turn."""
        return iter(self._requests.values())


class PriorityRequestQueue(RequestQueue):
    """Smaller priority first, then earlier arrival, then smaller id; no one can jump the queue."""

    def __init__(self) -> None:
        # Removed requests stay in the heap until they come to its top or are too many. The number
        # tells apart the entries of one request, so a comparison never reaches the requests.
        self._heap: list[tuple[int, float, str, int, Request]] = []
        self._entries: dict[str, int] = {}
        self._last_entry = 0

    def add_request(self, request: Request) -> None:
        """Queue a request at the place its priority, arrival and id give it."""
        self._last_entry = number = self._last_entry + 1
        entry = (request.priority, request.arrival_time, request.request_id, number, request)
        heapq.heappush(self._heap, entry)
        self._entries[request.request_id] = number

    def prepend_request(self, request: Request) -> None:
        """Same as `add_request`: having been in its turn gives no precedence, as in vLLM."""
        self.add_request(request)

    def peek_request(self) -> Request:
        """The request that sorts first. IndexError when the queue is empty."""
        heap, entries = self._heap, self._entries
        while entries.get(heap[0][-3]) != heap[0][-2]:
            heapq.heappop(heap)
        return heap[0][-1]

    def pop_request(self) -> Request:
        """Remove and return the request that sorts first. IndexError when the queue is empty."""
        request = self.peek_request()
        del self._entries[request.request_id]
        heapq.heappop(self._heap)
        return request

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove requests, each in constant time. KeyError when one is not in the queue."""
        for request in requests:
            del self._entries[request.request_id]
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = self._live_entries()

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """Requests in the order of their turn."""
        return (entry[-1] for entry in self._live_entries())

    def _live_entries(self) -> list[tuple[int, float, str, int, Request]]:
        """Sorted, which is a heap too."""
        entries = self._entries
        return sorted(entry for entry in self._heap if entries.get(entry[-3]) == entry[-2])


def create_request_queue(policy: str) -> RequestQueue:
    """An empty queue of policy "fcfs" or "priority"."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
