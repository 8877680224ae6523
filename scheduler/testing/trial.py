"""One run of events on a scheduler: again, to its end, and as a finding when it fails."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .audit import Audit, Entry, Judge
from .compare import Comparison, DeadlockError, DisagreementError
from .records import InvariantError
from .subject import Subject
from .trace import Event

RULES = ("invariants", "model")
FALLBACK_TOKEN = 5
DRAIN_STEPS = 500
"""Steps of a drain beyond one for each token that is left to compute: plain vLLM can preempt two
requests for each other's sake for ever."""


@dataclass(frozen=True)
class Finding:
    """A run that fails. events: what was given and, as far as it came, what was seen."""

    subject: Subject
    rules: str
    config: dict[str, Any]
    policy: dict[str, Any]
    events: list[Event]
    error: BaseException

    @property
    def message(self) -> str:
        """One line."""
        return f"{type(self.error).__name__}: {self.error}".splitlines()[0]

    @property
    def traceback(self) -> str:
        """Of the scheduler's own exception; of a broken rule there is none to show."""
        error: BaseException | None = self.error
        if isinstance(error, InvariantError | DisagreementError | DeadlockError):
            error = error.__cause__
        if error is None:
            return ""
        found = error.__traceback__
        while found and Path(found.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
            found = found.tb_next
        return "".join(traceback.format_exception(error.with_traceback(found)))

    @property
    def trace(self) -> dict[str, Any]:
        """What `segattn replay` reads."""
        return {
            "id": f"fuzz-{self.subject.kind}",
            "scheduler": self.subject.name,
            "judge": self.rules,
            "kind": self.subject.kind,
            "config": self.config,
            "policy": self.policy,
            "events": self.events,
        }

    @classmethod
    def of(
        cls, judge: Judge, rules: str, policy: Mapping[str, Any], error: BaseException
    ) -> "Finding":
        """A run that just failed."""
        return cls(judge.subject, rules, dict(judge.config), dict(policy), judge.events, error)


def judge(
    subject: Subject, config: Mapping[str, Any], policy: Mapping[str, Any], rules: str
) -> Judge:
    """A fresh scheduler with its judge. ValueError for unknown rules or a bad configuration."""
    if rules not in RULES:
        raise ValueError(f"rules={rules!r}: must be one of {', '.join(RULES)}")
    made: type[Audit] | type[Comparison] = Audit if rules == "invariants" else Comparison
    return made(subject, config, policy)


def run_events(
    subject: Subject,
    config: Mapping[str, Any],
    events: list[Event],
    *,
    policy: Mapping[str, Any] | None = None,
    rules: str = "invariants",
) -> list[Event]:
    """Give the events to a fresh scheduler and serve what is left; what was seen.

    Raises InvariantError for a broken rule, DisagreementError where the model decides otherwise,
    and whatever the scheduler raises.
    """
    run = judge(subject, config, policy or {}, rules)
    rerun(run, events)
    return run.events


def rerun(run: Judge, events: list[Event]) -> None:
    """Give the inputs of `events` to a judge, fitted where earlier events are gone, and drain it.

    Raises what `apply` raises. Ends early at a step that both sides refuse.
    """
    for event in events:
        given = event[:2]
        if event[0] in ("schedule", "fail") and len(run.pending) == run.subject.depth:
            continue
        if event[0] == "schedule":
            is_throttled = len(event) > 2 and event[2].get("throttle")
            given = [*given, {"throttle": 1}] if is_throttled else given
        if event[0] == "update":
            if event[1] not in run.pending:
                continue
            given = ["update", event[1], _fitting(run.pending[event[1]], dict(event[2]))]
        if event[0] == "add" and not run.can_reuse(event[1]["id"]):
            continue
        run.apply(given)
        if run.stopped:
            return
    drain(run)


def _fitting(entries: list[Entry], given: dict[str, list[int]]) -> list[Any]:
    """Model output that suits the step: nothing for a chunk, at most drafts + 1 tokens else."""
    return [
        [name, [] if chunk else (given.get(name) or [FALLBACK_TOKEN])[: drafts + 1]]
        for name, chunk, drafts in entries
    ]


def deliver(run: Judge, sample: Callable[[int], list[int]]) -> None:
    """Return the output of the oldest step; `sample` makes tokens from a number of drafts."""
    step = min(run.pending)
    entries = run.pending[step]
    sampled = [[name, [] if chunk else sample(drafts)] for name, chunk, drafts in entries]
    run.apply(["update", step, sampled])


def next_step(run: Judge) -> int:
    """A number that no step of the run has."""
    return 1 + max(
        (event[1] for event in run.events if event[0] in ("schedule", "fail")), default=-1
    )


def _most_tokens(run: Judge) -> int:
    """Tokens that the live requests can need: prompts and outputs."""
    live = set(run.live_ids())
    adds = [event[1] for event in run.events if event[0] == "add"]
    asked = [request for request in adds if request["id"] in live]
    return sum(len(request["prompt"]) + request["max_tokens"] for request in asked)


def drain(run: Judge) -> None:
    """Serve what is left; then the judge says whether that is an end."""
    if any(event[0] == "pause" for event in run.events):
        run.apply(["pause", 0])
    num_idle = num_steps = 0
    limit = DRAIN_STEPS + _most_tokens(run)
    while (run.pending or not run.is_idle()) and not run.stopped:
        if num_idle > run.subject.depth or num_steps > limit:
            break
        if len(run.pending) == run.subject.depth or run.is_idle():
            deliver(run, lambda drafts: [FALLBACK_TOKEN] * (drafts // 2 + 1))
        if not run.is_idle() and not run.stopped:
            seen = run.apply(["schedule", next_step(run)])
            num_idle = 0 if seen[2].get("total") else num_idle + 1
        num_steps += 1
    if not run.stopped:
        run.end()


def failure_of(
    subject: Subject,
    config: Mapping[str, Any],
    policy: Mapping[str, Any],
    events: list[Event],
    rules: str,
) -> Finding | None:
    """The run of these events as a finding; None when it is right."""
    run = judge(subject, config, policy, rules)
    try:
        rerun(run, events)
    except Exception as error:  # whatever the scheduler under test raises is the finding
        return Finding.of(run, rules, policy, error)
    return None
