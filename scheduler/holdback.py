"""Requests that are kept out of a scheduler's sight for a step: the holdback pattern."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .admission import Admission
from .request import Request
from .request_queue import RequestQueue


class Hidden(Protocol):
    """The scheduler under the rules: what they read of it, and the queues that they exchange."""

    running: list[Request]
    admission_counts: dict[Admission, int]
    max_model_len: int
    _pause_state: Any

    @property
    def requests(self) -> Mapping[str, Request]:
        """Live requests."""


class Holdback:
    """Running and waiting requests that `scheduler` does not see.

    `running` are the hidden running ones, `waiting` has the hidden waiting ones by the name of
    their queue. Between steps both are empty.
    """

    def __init__(self, scheduler: Hidden, queue_names: Sequence[str], keeps_order: bool) -> None:
        self._scheduler = scheduler
        self._keeps_order = keeps_order
        self.running: list[Request] = []
        self.waiting: dict[str, RequestQueue] = {
            name: type(getattr(scheduler, name))() for name in queue_names
        }

    def num_waiting(self) -> int:
        """Hidden waiting requests."""
        return sum(map(len, self.waiting.values()))

    def num_shown(self) -> int:
        """Waiting requests that the scheduler sees."""
        return sum(len(getattr(self._scheduler, name)) for name in self.waiting)

    def shown(self) -> list[Request]:
        """Waiting requests that the scheduler sees."""
        return [request for name in self.waiting for request in getattr(self._scheduler, name)]

    def hide_waiting(self) -> None:
        """Hide all waiting requests by exchanging the queues."""
        here, held = vars(self._scheduler), self.waiting
        for name in held:
            # In one line: between two, an interrupt would leave one queue under both names.
            here[name], held[name] = held[name], here[name]

    def show(self, name: str) -> None:
        """Show the request whose turn it is in a queue."""
        getattr(self._scheduler, name).add_request(self.waiting[name].pop_request())

    def hide_running(self, shown: list[Request]) -> None:
        """Hide the running requests that are not `shown`."""
        running = self._scheduler.running
        if len(shown) < len(running):
            shown_ids = set(map(id, shown))
            hidden = [request for request in running if id(request) not in shown_ids]
            self._scheduler.running, self.running = shown, hidden

    def restore(self, running: list[Request]) -> None:
        """Put back what was hidden; `running` is the list from before the step."""
        if self.running:
            merged = [*self._scheduler.running, *self.running]
            if self._keeps_order:
                admission = {id(request): index for index, request in enumerate(running)}
                merged.sort(key=lambda request: admission.get(id(request), len(admission)))
            self._scheduler.running, self.running = merged, []
        here = vars(self._scheduler)
        for name, held in self.waiting.items():
            shown = here[name]
            left_over: list[Request] = []
            while shown:
                left_over.append(shown.pop_request())
            prepend(held, left_over)
            here[name], self.waiting[name] = held, shown


def prepend(queue: RequestQueue, requests: Sequence[Request]) -> None:
    """Put `requests` in front of the queue in their own order."""
    for request in reversed(requests):
        queue.prepend_request(request)
