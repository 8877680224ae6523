"""A scheduler and the NumPy model side by side: the same events, equal observations."""

from typing import Any

from segattn.reference.scheduler_state import NeuronRules, Pause
from segattn.reference.scheduler_trace import Event, ModelTrace, rules_of_trace
from segattn.scheduler.trace import TraceDriver

Trace = dict[str, Any]

FALLBACK_TOKEN = 5


class DisagreementError(AssertionError):
    """The scheduler did not do what the model did."""


class DeadlockError(AssertionError):
    """Requests are left, nothing is in flight, and a step schedules nothing."""


class Comparison:
    """Gives each event to both sides; `events` are the model's observations so far.

    `policy` holds the fields of the Neuron policy that differ from the default one. Policies that
    refuse unschedulable requests must make progress in every step.
    """

    def __init__(self, kind: str, config: dict[str, Any], policy: dict[str, Any]) -> None:
        self.kind, self.config, self.policy = kind, config, policy
        self.neuron = NeuronRules(**policy)
        self.model = ModelTrace(rules_of_trace(kind, config, self.neuron))
        self.driver = TraceDriver(kind, config, policy)
        self.events: list[Event] = []
        self.pending: dict[int, list[tuple[str, bool, int]]] = {}
        """Steps in flight: id, whether it samples nothing, and drafts of each request."""

    @property
    def depth(self) -> int:
        """Steps that may be in flight: 2 in the asynchronous engine loop."""
        return 2 if self.kind.endswith("async") else 1

    @property
    def trace(self) -> Trace:
        """The run so far in the format of the golden traces."""
        head = {"id": f"fuzz-{self.kind}", "kind": self.kind, "config": self.config}
        return head | {"policy": self.policy, "events": self.events}

    def apply(self, event: Event) -> Event:
        """Perform an event.

        Raises DisagreementError, DeadlockError or what a faulty scheduler raises itself.
        """
        must_progress = event[0] == "schedule" and self._must_progress()
        expected = self.model.apply(event)
        self.events.append(expected)
        actual = self.driver.apply(event)
        if actual != expected:
            raise DisagreementError(difference(actual, expected))
        if is_error(expected) and not self.neuron.literal:
            raise DisagreementError(f"schedule {event[1]}: both sides raise {expected[2]['error']}")
        # The documented policy loses the requests that it hid when a step fails.
        if not is_error(expected) or not self.neuron.literal:
            self.driver.scheduler.check_integrity()
        if must_progress and not expected[2]["total"]:
            raise DeadlockError(f"{expected[2]['waiting']} wait, {expected[2]['running']} run")
        if event[0] == "schedule" and "error" not in expected[2]:
            self.pending[event[1]] = self._expected_outputs(expected[2])
        elif event[0] == "update":
            del self.pending[event[1]]
        return expected

    def can_reuse(self, request_id: str) -> bool:
        """Whether a trace can show a second request of this id apart from the first."""
        state = self.model.model.state
        live = set(state.live().tolist())
        unreported = [state.ids[row] for row in self.model.unreported if row not in live]
        return request_id not in unreported

    def _must_progress(self) -> bool:
        has_rule = self.kind.startswith("neuron") and not self.neuron.literal
        idle = not self.pending and self.model.model.state.pause == Pause.UNPAUSED
        return has_rule and idle and self.model.model.get_num_unfinished_requests() > 0

    def _expected_outputs(self, seen: dict[str, Any]) -> list[tuple[str, bool, int]]:
        state = self.model.model.state
        drafts = {name: len(tokens) for name, tokens in seen.get("spec", [])}
        rows = {name: state.row_of(name) for name, _ in seen["nst"]}
        return [
            (name, bool(state.requests["chunk"][row]), drafts.get(name, 0))
            for name, row in rows.items()
        ]


def rerun(run: Comparison, events: list[Event]) -> None:
    """Give the inputs of `events` to a fresh comparison, fitted where earlier events are gone.

    Raises what `Comparison.apply` raises. Ends early at an error that both sides show.
    """
    for event in events:
        given = event
        if event[0] == "schedule" and len(run.pending) == run.depth:
            continue
        if event[0] == "update":
            if event[1] not in run.pending:
                continue
            given = ["update", event[1], _fitting(run.pending[event[1]], dict(event[2]))]
        if event[0] == "add" and not run.can_reuse(event[1]["id"]):
            continue
        if is_error(run.apply(given)):
            return


def is_error(event: Event) -> bool:
    """Whether both sides refused to schedule, which ends a trace."""
    return bool(event[0] == "schedule" and "error" in event[2])


def _fitting(entries: list[tuple[str, bool, int]], given: dict[str, list[int]]) -> list[Any]:
    """Model output that suits the step: nothing for a chunk, at most drafts + 1 tokens else."""
    return [
        [name, [] if chunk else (given.get(name) or [FALLBACK_TOKEN])[: drafts + 1]]
        for name, chunk, drafts in entries
    ]


def difference(actual: Event, expected: Event) -> str:
    """The parts of two observations that differ."""
    ours, theirs = actual[-1], expected[-1]
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return f"{expected[0]}: got {actual[1:]}, the model says {expected[1:]}"
    keys = [key for key in theirs | ours if ours.get(key) != theirs.get(key)]
    parts = [f"{key}: got {ours.get(key)}, the model says {theirs.get(key)}" for key in keys]
    return f"{expected[0]} {expected[1]}: " + "; ".join(parts)
