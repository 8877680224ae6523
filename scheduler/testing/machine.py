"""The Hypothesis state machine: random work for a scheduler, judged step by step.

The judge is the NumPy model of vLLM's scheduler, with which every observation must agree, or the
invariants alone. At the end all requests are served.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...reference.scheduler_trace import check_options
from .. import SchedulerConfig
from .audit import Judge
from .coverage import Coverage, features_of
from .strategies import TOKENS, configs, policies, requests, sampled_tokens
from .subject import Subject
from .trace import Event
from .trial import Finding, deliver, drain, judge

from hypothesis import assume  # isort: skip - as the next ones
from hypothesis import strategies as st  # isort: skip - after strategies, which names the extra
from hypothesis.stateful import (  # isort: skip - the same
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)


@dataclass
class Campaign:
    """What the runs of a machine have in common, and what came of them.

    config, policy: parts that are fixed; the rest is drawn. keeps_runs: keep the traces of all.
    """

    subject: Subject
    rules: str = "invariants"
    config: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    keeps_runs: bool = False
    failure: Finding | None = None
    """The latest run that failed."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    num_runs: int = 0
    refusal: ValueError | None = None
    """Of the latest configuration that SchedulerConfig refused."""

    def __post_init__(self) -> None:
        if self.rules == "model":
            check_options(self.config)
        is_literal = self.policy.get("design", "own") != "own"
        self.coverage = Coverage(
            features_of(self.subject, is_literal=is_literal, with_model=self.rules == "model")
        )


class SchedulerMachine(RuleBasedStateMachine):
    """Base of the machines of all campaigns; subclasses set `campaign`."""

    campaign: ClassVar[Campaign]

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Draw a configuration and build both sides."""
        campaign = self.campaign
        serves_all = campaign.rules == "invariants"
        strategy = configs(campaign.subject, campaign.config, serves_all=serves_all)
        config = data.draw(strategy, label="config")
        self.policy: dict[str, Any] = {}
        if campaign.subject.takes_policy:
            self.policy = data.draw(policies(campaign.policy), label="policy")
        try:
            SchedulerConfig(**config)
        except ValueError as error:  # the fixed part does not fit the drawn one
            campaign.refusal = error
            assume(False)
        campaign.num_runs += 1
        self.num_added = self.num_steps = 0
        # No prompt may fill the model: plain vLLM would never serve it.
        self.max_prompt = max(1, config["max_model_len"] - serves_all)
        campaign.coverage.start_run(config, self.policy)
        self.judge: Judge = judge(campaign.subject, config, self.policy, campaign.rules)
        self.add(data, data.draw(st.integers(1, 4)))

    @property
    def is_stopped(self) -> bool:
        """Whether the run is over: it failed, or both sides refused a step."""
        return self.judge.stopped

    def apply(self, event: Event) -> None:
        """Give an event to the judge."""
        self.noting(lambda: self.judge.apply(event))

    def noting(self, act: Callable[[], Any]) -> None:
        """Do something that may fail: that is noted for the shrinker, and raised again."""
        num_events = len(self.judge.events)
        try:
            act()
        except Exception as error:  # whatever the scheduler raises; not Hypothesis's own StopTest
            self.judge.stopped = True
            campaign = self.campaign
            campaign.failure = Finding.of(self.judge, campaign.rules, self.policy, error)
            raise
        for event in self.judge.events[num_events:]:
            self.campaign.coverage.see(event)

    @precondition(lambda self: not self.is_stopped)
    @rule(data=st.data(), count=st.integers(1, 3))
    def add(self, data: st.DataObject, count: int) -> None:
        """Add requests, often twins; now and then one under the id of an earlier request."""
        limits = self.max_prompt, self.judge.config["max_model_len"]
        twin = data.draw(st.none() | requests(*limits, "", self.num_added))
        for _ in range(count):
            name = f"r{self.num_added}"
            if self.num_added and data.draw(st.integers(0, 9)) == 9:
                earlier = f"r{data.draw(st.integers(0, self.num_added - 1))}"
                name = earlier if self.judge.can_reuse(earlier) else name
            if twin is None:
                request = data.draw(requests(*limits, name, self.num_added))
            else:
                request = twin | {"id": name}
            self.apply(["add", request])
            self.num_added += 1

    @precondition(lambda self: not self.is_stopped and self.num_added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort requests, live ones or not, one or nearly all of them."""
        some = st.integers(0, self.num_added - 1).map("r{}".format)
        self.apply(["abort", data.draw(st.lists(some, min_size=1, max_size=6))])

    @precondition(lambda self: not self.is_stopped)
    @rule(data=st.data(), running=st.booleans())
    def reset(self, data: st.DataObject, running: bool) -> None:
        """Reset the prefix cache, between steps or, as asynchronous engines do, in one."""
        if self.judge.pending and self.judge.subject.depth == 1:
            self.deliver(data)
        if not self.is_stopped:
            self.apply(["reset", int(running)])

    @precondition(lambda self: not self.is_stopped)
    @rule(data=st.data(), count=st.integers(1, 8))
    def preempt_all(self, data: st.DataObject, count: int) -> None:
        """Preempt all that run and go on: who resumes may find what another cached again."""
        self.reset(data, running=True)
        if not self.is_stopped:
            self.run_steps(data, count)

    @precondition(lambda self: not self.is_stopped)
    @rule(state=st.sampled_from([0, 0, 1, 2]))
    def pause(self, state: int) -> None:
        """Set the pause state."""
        self.apply(["pause", state])

    @precondition(
        lambda self: not self.is_stopped and len(self.judge.pending) < self.judge.subject.depth
    )
    @rule(throttle=st.sampled_from([False, False, False, True]))
    def schedule(self, throttle: bool) -> None:
        """Start a step whose output stays in flight; the model knows no throttling."""
        can_throttle = self.campaign.rules == "invariants" and self.judge.subject.takes_throttle
        self.num_steps += 1
        step = ["schedule", self.num_steps - 1]
        self.apply([*step, {"throttle": 1}] if throttle and can_throttle else step)

    @precondition(
        lambda self: not self.is_stopped and len(self.judge.pending) < self.judge.subject.depth
    )
    @rule()
    def fail(self) -> None:
        """A step whose execution fails; vLLM has no way back from it, so the model has none."""
        if self.campaign.rules == "invariants" and self.judge.subject.takes_failures:
            self.num_steps += 1
            self.apply(["fail", self.num_steps - 1])

    @precondition(lambda self: not self.is_stopped and self.judge.pending)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Return the output of the oldest step in flight."""

        def draw(drafts: int) -> list[int]:
            accepted = data.draw(st.integers(0, drafts)) if drafts else 0
            return data.draw(sampled_tokens(accepted + 1))

        self.noting(lambda: deliver(self.judge, draw))

    @precondition(lambda self: not self.is_stopped)
    @rule(data=st.data(), count=st.integers(1, 6))
    def run_steps(self, data: st.DataObject, count: int) -> None:
        """Several turns of the engine loop, as deep as the kind allows."""
        for _ in range(count):
            if len(self.judge.pending) == self.judge.subject.depth:
                self.deliver(data)
                self.propose_drafts(data)
            if not self.is_stopped:
                self.schedule(throttle=False)
        # Some rules need a scheduler between steps.
        if not self.is_stopped and data.draw(st.booleans()):
            self.deliver(data)

    @precondition(lambda self: not self.is_stopped)
    @rule(data=st.data())
    def propose_drafts(self, data: st.DataObject) -> None:
        """Propose drafts for the next step (the asynchronous kinds make placeholders instead)."""
        if self.judge.pending or self.judge.subject.depth > 1:
            return
        most = self.judge.config.get("num_speculative_tokens", 0)
        tokens = st.lists(st.sampled_from(TOKENS), min_size=0, max_size=most)
        names = self.judge.live_ids()
        if most and names:
            self.apply(["drafts", [[name, data.draw(tokens)] for name in names]])

    @precondition(lambda self: self.is_stopped)
    @rule()
    def rest(self) -> None:
        """A step that both sides refuse ends a run; Hypothesis wants something to do."""

    def teardown(self) -> None:
        """Serve what is left, as far as the kind serves everything."""
        if not hasattr(self, "judge") or self.is_stopped:
            return
        self.noting(lambda: drain(self.judge))
        campaign = self.campaign
        if campaign.keeps_runs:
            head = Finding.of(self.judge, campaign.rules, self.policy, AssertionError())
            campaign.runs.append(head.trace)


def machine(campaign: Campaign) -> type[SchedulerMachine]:
    """Machine class of a campaign; its `TestCase` is a test for pytest and unittest."""
    name = f"{campaign.subject.cls.__name__}Machine"
    return type(name, (SchedulerMachine,), {"campaign": campaign})
