"""Whose turn it is: prefills or decodes, which never share a step, and which decodes."""

from .policy import NeuronPolicy
from .request import Request


class Turns:
    """Bounds how long prefills keep decodes waiting, decodes prefills, and decodes each other.

    After `max_consecutive_prefills` prefill steps in a row, decodes have `max_consecutive_decodes`
    steps, for each round that it takes to serve all of them with `max_decodes` in a step. A prefill
    that could not start gives one decode step too: decodes free blocks.
    """

    def __init__(self, policy: NeuronPolicy, max_decodes: int) -> None:
        self._policy = policy
        self.max_decodes = max(max_decodes, 1)
        self._num_prefills = 0
        self._num_decodes_due = 0
        self._prefill_was_stuck = False
        self._served: dict[str, int] = {}

    @property
    def decodes_are_due(self) -> bool:
        """Whether decodes that can run go before prefills."""
        return self._num_decodes_due > 0 or self._prefill_was_stuck

    def key(self) -> tuple[int, int, bool]:
        """All that later turns depend on, while a step has room for all decodes."""
        limit = self._policy.max_consecutive_prefills
        num_prefills = 0 if limit is None else min(self._num_prefills, limit)
        return num_prefills, self._num_decodes_due, self._prefill_was_stuck

    def decodes_of_a_step(self, decodes: list[Request]) -> list[Request]:
        """All of them, or those that were served longest ago if the budget is too small for all.

        The literal policies leave the choice to the scheduler.
        """
        if len(decodes) <= self.max_decodes or self._policy.is_literal:
            return decodes
        served = {r.request_id: self._served.get(r.request_id, 0) for r in decodes}
        chosen = set(sorted(served, key=served.__getitem__)[: self.max_decodes])
        self._served = served | dict.fromkeys(chosen, max(served.values()) + 1)
        return [request for request in decodes if request.request_id in chosen]

    def note_prefill(self, num_running: int) -> None:
        """A step prefilled, and `num_running` requests are to be served by decodes."""
        self._prefill_was_stuck = False
        self._num_prefills += 1
        limit = self._policy.max_consecutive_prefills
        if limit is not None and self._num_prefills >= limit:
            num_rounds = -(-num_running // self.max_decodes) or 1
            self._num_decodes_due = self._policy.max_consecutive_decodes * num_rounds

    def note_decode(self) -> None:
        """A step decoded."""
        self._prefill_was_stuck = False
        self._num_prefills = 0
        self._num_decodes_due = max(self._num_decodes_due - 1, 0)

    def note_empty(self, is_stuck: bool) -> None:
        """A step did nothing; `is_stuck` if decodes were hidden for a prefill."""
        self._prefill_was_stuck = is_stuck
