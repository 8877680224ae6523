"""A scheduler and the NumPy model side by side: the same events, equal observations."""

from collections.abc import Mapping
from typing import Any

from ...reference.scheduler_content import KVContent
from ...reference.scheduler_state import NeuronRules, Pause
from ...reference.scheduler_trace import ModelTrace, rules_of_trace
from .. import SchedulerConfig, SchedulerOutput
from .audit import Entry
from .subject import Subject
from .trace import Event, TraceDriver


class DisagreementError(AssertionError):
    """The scheduler did not do what the model did."""


class DeadlockError(AssertionError):
    """Requests are left, nothing is in flight, and a step schedules nothing."""


class Comparison:
    """Gives each event to both sides; `events` are the model's observations so far.

    `policy` holds the fields of the Neuron policy that differ from the default one. Policies that
    refuse unschedulable requests must make progress in every step, and what their requests read in
    the KV cache must have been computed for their tokens. vLLM's own kinds break that rule now and
    then (docs/decisions.md), and with drafts in flight no output tells what a runner reads.
    """

    def __init__(
        self, subject: Subject, config: Mapping[str, Any], policy: Mapping[str, Any]
    ) -> None:
        self.subject, self.config = subject, config
        self.neuron = NeuronRules(**policy)
        self.model = ModelTrace(rules_of_trace(subject.kind, config, self.neuron))
        self.driver = TraceDriver(subject.make(SchedulerConfig(**config), policy))
        self.events: list[Event] = []
        self.pending: dict[int, list[Entry]] = {}
        self.stopped = False
        has_rule = subject.is_neuron and not self.neuron.literal
        is_told = subject.depth == 1 or not config.get("num_speculative_tokens")
        self._content = KVContent(config["block_size"]) if has_rule and is_told else None

    def apply(self, event: Event) -> Event:
        """Perform an event.

        Raises DisagreementError, DeadlockError or what a faulty scheduler raises itself.
        """
        must_progress = event[0] == "schedule" and self._must_progress()
        output = self.driver.in_flight.get(event[1]) if event[0] == "update" else None
        expected = self.model.apply(event)
        self.events.append(expected)
        actual = self.driver.apply(event)
        if actual != expected:
            cause = self.driver.error if is_error(actual) else None
            raise DisagreementError(difference(actual, expected)) from cause
        if is_error(expected) and not self.neuron.literal:
            raise DisagreementError(f"schedule {event[1]}: both sides raise {expected[2]['error']}")
        # The documented policy loses the requests that it hid when a step fails.
        if not is_error(expected) or not self.neuron.literal:
            self.driver.scheduler.check_integrity()
        if must_progress and not expected[2]["total"]:
            raise DeadlockError(f"{expected[2]['waiting']} wait, {expected[2]['running']} run")
        if event[0] == "schedule" and "error" not in expected[2]:
            self._check_told(self.driver.in_flight[event[1]])
            self.pending[event[1]] = self._expected_outputs(expected[2])
        elif event[0] == "update":
            del self.pending[event[1]]
            if self._content is not None and output is not None:
                for complaint in self._content.execute(output, dict(event[2])):
                    raise DisagreementError(complaint)
        self.stopped = is_error(expected)
        return expected

    def live_ids(self) -> list[str]:
        """Requests that are not finished."""
        state = self.model.model.state
        return [state.ids[row] for row in state.live()]

    def is_idle(self) -> bool:
        """Whether no step would do anything, not even report a finished request."""
        return not self.model.model.has_requests()

    def end(self) -> None:
        """Plain vLLM may leave requests that can never be served: the model says which."""

    def can_reuse(self, request_id: str) -> bool:
        """Whether a trace can show a second request of this id apart from the first."""
        state = self.model.model.state
        live = set(state.live().tolist())
        unreported = [state.ids[row] for row in self.model.unreported if row not in live]
        return request_id not in unreported

    def _check_told(self, output: SchedulerOutput) -> None:
        """The tokens that the runner is told are those that the model knows."""
        state, prompts = self.model.model.state, {}
        for new in output.scheduled_new_reqs:
            prompts[new.req_id] = new.prompt_token_ids
        for name, tokens in (prompts | output.scheduled_cached_reqs.all_token_ids).items():
            row = state.row_of(name)
            assert row is not None
            num_known = state.requests["prompt"][row] if name in prompts else None
            known = state.tokens[row].tolist()[:num_known]
            if tokens != known:
                raise DisagreementError(f"{name}: told tokens {tokens}, the model knows {known}")

    def _must_progress(self) -> bool:
        has_rule = self.subject.is_neuron and not self.neuron.literal
        idle = not self.pending and self.model.model.state.pause == Pause.UNPAUSED
        return has_rule and idle and self.model.model.get_num_unfinished_requests() > 0

    def _expected_outputs(self, seen: dict[str, Any]) -> list[Entry]:
        state = self.model.model.state
        drafts = {name: len(tokens) for name, tokens in seen.get("spec", [])}
        rows = {name: state.row_of(name) for name, _ in seen["nst"]}
        return [
            (name, bool(state.requests["chunk"][row]), drafts.get(name, 0))
            for name, row in rows.items()
        ]


def is_error(event: Event) -> bool:
    """Whether both sides refused to schedule, which ends a trace."""
    return bool(event[0] == "schedule" and "error" in event[2])


def difference(actual: Event, expected: Event) -> str:
    """The parts of two observations that differ."""
    ours, theirs = actual[-1], expected[-1]
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return f"{expected[0]}: got {actual[1:]}, the model says {expected[1:]}"
    keys = [key for key in theirs | ours if ours.get(key) != theirs.get(key)]
    parts = [f"{key}: got {ours.get(key)}, the model says {theirs.get(key)}" for key in keys]
    return f"{expected[0]} {expected[1]}: " + "; ".join(parts)
