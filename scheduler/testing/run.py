"""Run events on a scheduler, look for a run that breaks a rule, and make it small."""

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from .. import (
    ModelRunnerOutput,
    PauseState,
    Request,
    RequestError,
    RequestStatus,
    SchedulerConfig,
    SchedulerOutput,
)
from .events import EOS, TOKENS, Event, random_config, random_events
from .ledger import InvariantError, Ledger, Record
from .subject import Subject

DRAIN_FACTOR = 20
"""Steps to serve what is left, over the tokens that it can have: preemption repeats some."""
IDLE_STEPS = 3
"""Steps without work, with requests left and nothing paused, that are a deadlock."""


@dataclass(frozen=True)
class Finding:
    """A run that fails."""

    subject: Subject
    config: dict[str, Any]
    events: list[Event]
    error: BaseException
    seed: int = 0

    @property
    def message(self) -> str:
        """One line."""
        return f"{type(self.error).__name__}: {self.error}"

    @property
    def traceback(self) -> str:
        """Of the scheduler's own exception; of a broken rule there is none to show."""
        if isinstance(self.error, InvariantError):
            return ""
        return "".join(traceback.format_exception(self.error))


def run_events(subject: Subject, config: Mapping[str, Any], events: list[Event]) -> list[str]:
    """Give the events to a fresh scheduler, then serve what is left; a line on each step.

    Raises InvariantError for a broken rule, and whatever the scheduler raises.
    """
    run = Run(subject, SchedulerConfig(**config))
    for event in events:
        run.apply(event)
    run.drain()
    return run.log


class Run:
    """One scheduler, its ledger, the steps in flight and a line on each event."""

    def __init__(self, subject: Subject, config: SchedulerConfig) -> None:
        self.scheduler = subject.make(config)
        self.ledger = Ledger(config, neuron=subject.neuron, policy=subject.policy)
        self.in_flight: list[tuple[SchedulerOutput, list[tuple[Record, bool]]]] = []
        self.log: list[str] = []
        self.idle = 0

    def apply(self, event: Event) -> None:
        """Perform an event."""
        name, *given = event
        getattr(self, f"_{name}")(*given)

    def _add(self, given: Mapping[str, Any]) -> None:
        name = given["id"]
        if name in self.ledger.live:
            return
        stops = frozenset({EOS})
        request = Request(
            name,
            list(given["prompt"]),
            given["max_tokens"],
            arrival_time=float(self.ledger.arrivals),
            eos_token_id=EOS,
            cache_salt=given.get("salt"),
        )
        try:
            self.scheduler.add_request(request)
        except RequestError as error:
            self.log.append(f"add {name}: refused ({error})")
            return
        self.ledger.add(given, stops)
        tokens = f"{len(given['prompt'])} tokens, max_tokens={given['max_tokens']}"
        self.log.append(f"add {name}: {tokens}")

    def _abort(self, ids: list[str]) -> None:
        live = [name for name in dict.fromkeys(ids) if name in self.ledger.live]
        if live:
            self.scheduler.finish_requests(live, RequestStatus.FINISHED_ABORTED)
            for name in live:
                self.ledger.gone(name)
            self.log.append(f"abort {', '.join(live)}")

    def _reset(self, running: bool) -> None:
        while self.in_flight:
            self._deliver([TOKENS[0]])
        done = self.scheduler.reset_prefix_cache(reset_running_requests=running)
        self.log.append(f"reset the prefix cache{' and all that run' if running else ''}: {done}")
        self.ledger.reset(done, running)

    def _pause(self, state: int) -> None:
        self.scheduler.set_pause_state(PauseState(state))
        self.ledger.pause = state
        self.log.append(f"pause: {PauseState(state).name}")

    def _schedule(self) -> None:
        if self.in_flight:
            self._deliver([TOKENS[0]])
        output = self.scheduler.schedule()
        counts = dict(output.num_scheduled_tokens)
        self.log.append(f"schedule: {counts or 'nothing'}")
        samples = self.ledger.step(output)
        self.in_flight.append((output, samples))
        idle = not counts and self.ledger.live and not self.ledger.pause
        self.idle = self.idle + 1 if idle else 0
        if self.idle >= IDLE_STEPS:
            left = [*self.ledger.live]
            raise InvariantError(f"a deadlock: nothing is scheduled, {left} are left")

    def _deliver(self, tokens: list[int]) -> None:
        if not self.in_flight:
            return
        output, samples = self.in_flight.pop(0)
        expected: dict[str, tuple[list[int], str | None]] = {}
        sampled: list[list[int]] = []
        for number, (record, samples_one) in enumerate(samples):
            token = tokens[number % len(tokens)]
            sampled.append([token] if samples_one else [])
            if samples_one and self.ledger.live.get(record.name) is record:
                expected[record.name] = self.ledger.expected_output(record, token)
        ids = [record.name for record, _ in samples]
        outputs = self.scheduler.update_from_output(output, ModelRunnerOutput(ids, sampled))
        self.log.append(f"deliver: {dict(zip(ids, sampled, strict=True))}")
        found = {o.request_id: (list(o.new_token_ids), o.finish_reason) for o in outputs}
        if found != expected:
            raise InvariantError(f"the outputs are {found}, must be {expected}")
        for name, (_, reason) in expected.items():
            if reason is not None:
                self.ledger.gone(name)

    def drain(self) -> None:
        """Serve what is left: it must come to an end."""
        if self.ledger.pause:
            self._pause(0)
        limit = DRAIN_FACTOR * (1 + len(self.ledger.live)) * self.ledger.config.max_model_len
        for _ in range(limit):
            if not self.ledger.live and not self.in_flight:
                return
            if self.in_flight:
                self._deliver([TOKENS[0]])
            else:
                self._schedule()
        raise InvariantError(f"{[*self.ledger.live]} do not end in {limit} steps")


def _failure(
    subject: Subject, config: Mapping[str, Any], events: list[Event], seed: int = 0
) -> Finding | None:
    try:
        run_events(subject, config, events)
    except Exception as error:  # whatever the scheduler under test raises is the finding
        return Finding(subject, dict(config), events, error, seed)
    return None


def fuzz(
    subject: Subject,
    *,
    seconds: float = 10.0,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    events: int = 60,
    tell: Callable[[float], None] = lambda elapsed: None,
) -> Finding | None:
    """Random runs until the time is over, at least 20; the first failure, shrunk."""
    start = time.monotonic()
    number = 0
    while number < 20 or time.monotonic() - start < seconds:
        random = Random(f"{seed} {number}")
        drawn = random_config(random, config or {})
        work = random_events(random, drawn, events)
        found = _failure(subject, drawn, work, number)
        if found is not None:
            return shrink(found)
        number += 1
        tell(time.monotonic() - start)
    return None


def shrink(finding: Finding) -> Finding:
    """The smallest failing run that removing events and simplifying requests finds."""
    improved = True
    while improved:
        improved = False
        for events in _simpler(finding.events):
            smaller = _failure(finding.subject, finding.config, events, finding.seed)
            # Another kind of failure is another finding.
            if smaller is not None and type(smaller.error) is type(finding.error):
                finding, improved = replace(smaller, seed=finding.seed), True
                break
    return finding


def _simpler(events: list[Event]) -> Iterator[list[Event]]:
    size = len(events)
    while size:
        for start in range(0, len(events), size):
            yield events[:start] + events[start + size :]
        size //= 2
    for index, event in enumerate(events):
        if event[0] != "add":
            continue
        request = event[1]
        shorter = [request | {"prompt": request["prompt"][: len(request["prompt"]) // 2]}]
        shorter.append(request | {"prompt": request["prompt"][:-1]})
        shorter.append(request | {"max_tokens": request["max_tokens"] // 2})
        shorter.append(request | {"salt": None})
        for simpler in shorter:
            if simpler != request and simpler["prompt"] and simpler["max_tokens"]:
                yield [*events[:index], ["add", simpler], *events[index + 1 :]]
