"""Whose turn it is: prefills or decodes, which never share a step."""

from .policy import NeuronPolicy


class Turns:
    """Bounds how long prefills keep decodes waiting, and decodes prefills.

    After `max_consecutive_prefills` prefill steps in a row, decodes have `max_consecutive_decodes`
    steps, for each round that it takes to serve all of them. A prefill that could not start gives
    one decode step too: decodes free blocks.
    """

    def __init__(self, policy: NeuronPolicy) -> None:
        self._policy = policy
        self._num_prefills = 0
        self._num_decodes_due = 0
        self._prefill_was_stuck = False

    @property
    def decodes_are_due(self) -> bool:
        """Whether decodes that can run go before prefills."""
        return self._num_decodes_due > 0 or self._prefill_was_stuck

    def key(self) -> tuple[int, int, bool]:
        """All that later turns depend on."""
        limit = self._policy.max_consecutive_prefills
        num_prefills = 0 if limit is None else min(self._num_prefills, limit)
        return num_prefills, self._num_decodes_due, self._prefill_was_stuck

    def note_prefill(self, num_rounds: int) -> None:
        """A step prefilled; it takes `num_rounds` steps to serve all decodes."""
        self._prefill_was_stuck = False
        self._num_prefills += 1
        limit = self._policy.max_consecutive_prefills
        if limit is not None and self._num_prefills >= limit:
            self._num_decodes_due = self._policy.max_consecutive_decodes * num_rounds

    def note_decode(self) -> None:
        """A step decoded."""
        self._prefill_was_stuck = False
        self._num_prefills = 0
        self._num_decodes_due = max(self._num_decodes_due - 1, 0)

    def note_empty(self, is_stuck: bool) -> None:
        """A step did nothing; `is_stuck` if decodes were hidden for a prefill."""
        self._prefill_was_stuck = is_stuck
