"""A scheduler driven through its interface alone, and judged by the invariants."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Protocol

from .. import (
    DraftTokenIds,
    ModelRunnerOutput,
    NeuronPolicy,
    PauseState,
    RequestStatus,
    SchedulerConfig,
    SchedulerOutput,
)
from .ledger import Ledger
from .records import InvariantError, Work
from .subject import Subject
from .trace import Event, make_request, observe_output

Entry = tuple[str, bool, int]
"""A request of a step in flight: its id, whether it samples nothing, its drafts."""


class Judge(Protocol):
    """Gives events to a scheduler and raises where it is wrong.

    events: what was given and what was seen, in the format of `testing/trace.py`. pending:
    steps in flight. stopped: whether both sides refused a step, which ends a run.
    """

    subject: Subject
    config: Mapping[str, Any]
    events: list[Event]
    pending: dict[int, list[Entry]]
    stopped: bool

    def apply(self, event: Event) -> Event:
        """Perform an event; the event with what was seen."""

    def can_reuse(self, request_id: str) -> bool:
        """Whether a request of this id may be added now, to be taken or refused."""

    def live_ids(self) -> list[str]:
        """Requests that are not finished."""

    def is_idle(self) -> bool:
        """Whether no step would do anything, not even report a finished request."""

    def end(self) -> None:
        """The run is over: nothing is left, or nothing goes on."""


class Audit:
    """One scheduler, its ledger and the steps in flight.

    patience: steps without work, with requests left, that are a deadlock.
    """

    def __init__(
        self,
        subject: Subject,
        config: SchedulerConfig | Mapping[str, Any],
        policy: Mapping[str, Any],
        patience: int = 3,
    ) -> None:
        self.subject, self.patience = subject, patience
        limits = config if isinstance(config, SchedulerConfig) else SchedulerConfig(**config)
        self.config = {} if isinstance(config, SchedulerConfig) else config
        self.scheduler = subject.make(limits, policy)
        promised = NeuronPolicy(**policy) if subject.takes_policy else None
        self.ledger = Ledger(limits, is_neuron=subject.is_neuron, policy=promised)
        self.events: list[Event] = []
        self.pending: dict[int, list[Entry]] = {}
        self.stopped = False
        self._steps: dict[int, tuple[SchedulerOutput, list[Work]]] = {}
        self._padding = self._num_idle = 0

    def can_reuse(self, request_id: str) -> bool:
        """Always: a live one must be refused."""
        return True

    def live_ids(self) -> list[str]:
        """Requests that are not finished."""
        return [*self.ledger.live]

    def is_idle(self) -> bool:
        """Whether nothing is left to compute or to report."""
        return not self.ledger.live and not self.ledger.unreported

    def end(self) -> None:
        """Nothing may be left, and all blocks must be free."""
        if self.ledger.live:
            raise InvariantError(f"{self.live_ids()} do not end")
        self.apply(["reset", 0])

    def apply(self, event: Event) -> Event:
        """Perform an event; raises InvariantError, and whatever the scheduler raises."""
        self.events.append(event)
        self.events[-1] = seen = [*event[:1], *self.perform(event)]
        return seen

    def perform(self, event: Event) -> Event:
        """Perform an event without a record of it; what was seen."""
        name, *given = event
        match name:
            case "add":
                return self._add(given[0])
            case "abort":
                return [given[0], self._abort(given[0])]
            case "reset":
                done = self.scheduler.reset_prefix_cache(reset_running_requests=bool(given[0]))
                self.ledger.reset(done, bool(given[0]))
                return [given[0], done]
            case "pause":
                self.scheduler.set_pause_state(PauseState(given[0]))
                self.ledger.pause = given[0]
                return [given[0]]
            case "drafts":
                self._propose(dict(given[0]))
                return [given[0]]
            case "schedule":
                throttled = len(given) > 1 and bool(given[1].get("throttle"))
                output = self.schedule(given[0], throttled)
                seen = observe_output(output)
                seen |= {"running": self._running(), "padtot": self._padding}
                return [given[0], seen | {"throttle": 1} if throttled else seen]
            case "fail":
                seen = observe_output(self._fail(given[0]))
                return [given[0], seen | {"running": self._running()}]
            case "update":
                outs = self.update(given[0], dict(given[1]))
                return [*given[:2], {"outs": outs, "running": self._running()}]
        raise ValueError(f"event={name!r}: no such event")

    def _running(self) -> list[str]:
        return [name for name, record in self.ledger.live.items() if record.table]

    def _add(self, given: dict[str, Any]) -> Event:
        try:
            self.scheduler.add_request(make_request(given))
        except ValueError as error:
            self.ledger.add(given, error)
            return [given, "RequestError"]
        self.ledger.add(given, None)
        return [given]

    def _abort(self, ids: list[str]) -> list[str]:
        live = [name for name in dict.fromkeys(ids) if name in self.ledger.live]
        self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
        for name in live:
            self.ledger.gone(name)
        return live

    def _propose(self, drafts: Mapping[str, list[int]]) -> None:
        given = DraftTokenIds([*drafts], [list(tokens) for tokens in drafts.values()])
        self.scheduler.update_draft_token_ids(given)
        for name, tokens in drafts.items():
            if name in self.ledger.live:
                self.ledger.live[name].drafts = list(tokens)

    def _fail(self, step: int) -> SchedulerOutput:
        """A step whose execution fails at once: it is judged as any other, and taken back."""
        scheduler, judged = self.scheduler, deepcopy(self.ledger)
        output: SchedulerOutput = scheduler.schedule()
        works = judged.step(output)
        scheduler.step_failed(output, RuntimeError(f"step {step} fails"))
        self.ledger.taken_back(output, works)
        self.ledger.neuron = judged.neuron  # it had its turn all the same
        return output

    def schedule(self, step: int, throttled: bool = False) -> SchedulerOutput:
        """Start a step."""
        scheduler = self.scheduler
        output: SchedulerOutput = scheduler.schedule(True) if throttled else scheduler.schedule()
        works = self.ledger.step(output, throttled)
        waits = bool(self.ledger.live) and not self._steps and not self.ledger.pause
        self._num_idle = self._num_idle + 1 if waits and not works and not throttled else 0
        if self._num_idle >= self.patience:
            raise InvariantError(
                f"a deadlock: nothing is in flight and nothing is scheduled, {self.live_ids()} are "
                "left"
            )
        padded = output.num_scheduled_tokens_padded or output.num_scheduled_tokens
        self._padding += sum(padded.values()) - output.total_num_scheduled_tokens
        self._steps[step] = output, works
        self.pending[step] = [(w.record.name, not w.samples, w.drafts) for w in works]
        return output

    def update(self, step: int, sampled: Mapping[str, list[int]]) -> list[Any]:
        """Return the tokens of a step; id, tokens, finish and stop reason of each output."""
        output, works = self._steps.pop(step)
        del self.pending[step]
        rows = [sampled[work.record.name] for work in works]
        outputs = self.scheduler.update_from_output(
            output, ModelRunnerOutput([work.record.name for work in works], rows)
        )
        found = {o.request_id: (list(o.new_token_ids), o.finish_reason) for o in outputs}
        self.ledger.deliver(works, sampled, found)
        return [[o.request_id, o.new_token_ids, o.finish_reason, o.stop_reason] for o in outputs]
