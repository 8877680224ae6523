"""Hypothesis state machine: a scheduler and the NumPy model take the same events, step by step.

Every observation must agree and the scheduler's own integrity check must hold after every event.
At the end all requests are served; under the default Neuron rules that must come to an end.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from segattn.benchmarks.fuzz.compare import Comparison, Trace, is_error
from segattn.benchmarks.fuzz.coverage import Coverage, features_of
from segattn.benchmarks.fuzz.strategies import TOKENS, configs, requests, sampled_tokens
from segattn.reference.scheduler_trace import Event

from hypothesis import strategies as st  # isort: skip - as the next one
from hypothesis.stateful import (  # isort: skip - after strategies, which names the extra
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

KINDS = ("base", "async", "neuron", "neuron_async")


DRAIN_STEPS = 300
"""Plain vLLM can preempt two requests for each other's sake for ever; nothing else lasts longer."""


class SchedulerMachine(RuleBasedStateMachine):
    """Base of the machines of all kinds; subclasses set the class variables."""

    kind: ClassVar[str]
    policy: ClassVar[st.SearchStrategy[dict[str, Any]]]
    coverage: ClassVar[Coverage]
    failure: ClassVar[Trace | None] = None
    """Trace of the latest run that failed."""
    runs: ClassVar[list[Trace] | None] = None
    """Where the traces of all runs go; None: nowhere."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Draw a configuration and build both sides."""
        config = data.draw(configs(self.kind), label="config")
        policy = data.draw(self.policy, label="policy") if "neuron" in self.kind else {}
        self.comparison = Comparison(self.kind, config, policy)
        self.num_added = self.num_steps = 0
        self.stopped = False
        self.coverage.start_run(config, policy)
        self.add(data, data.draw(st.integers(1, 4)))

    @property
    def is_idle(self) -> bool:
        """Whether no step would do anything, not even report a finished request."""
        return not self.comparison.model.model.has_requests()

    def apply(self, event: Event) -> Event:
        """Give an event to both sides and compare what they show."""
        try:
            seen = self.comparison.apply(event)
        except BaseException:  # noted for the shrinker, and raised again
            self.stopped = True
            type(self).failure = self.comparison.trace
            raise
        self.coverage.see(seen)
        self.stopped = is_error(seen)
        return seen

    @precondition(lambda self: not self.stopped)
    @rule(data=st.data(), count=st.integers(1, 3))
    def add(self, data: st.DataObject, count: int) -> None:
        """Add requests, often twins; now and then one under the id of an earlier request."""
        limit = self.comparison.config["max_model_len"]
        twin = data.draw(st.none() | requests(limit, "", self.num_added))
        for _ in range(count):
            name = f"r{self.num_added}"
            if self.num_added and data.draw(st.integers(0, 9)) == 9:
                earlier = f"r{data.draw(st.integers(0, self.num_added - 1))}"
                name = earlier if self.comparison.can_reuse(earlier) else name
            if twin is None:
                request = data.draw(requests(limit, name, self.num_added))
            else:
                request = twin | {"id": name}
            self.apply(["add", request])
            self.num_added += 1

    @precondition(lambda self: not self.stopped and self.num_added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort requests, live ones or not."""
        some = st.integers(0, self.num_added - 1).map("r{}".format)
        self.apply(["abort", data.draw(st.lists(some, min_size=1, max_size=2))])

    @precondition(lambda self: not self.stopped)
    @rule(data=st.data(), running=st.booleans())
    def reset(self, data: st.DataObject, running: bool) -> None:
        """Reset the prefix cache, between steps or, as asynchronous engines do, in one."""
        if self.comparison.pending and self.comparison.depth == 1:
            self.deliver(data)
        if not self.stopped:
            self.apply(["reset", int(running)])

    @precondition(lambda self: not self.stopped)
    @rule(data=st.data(), count=st.integers(1, 8))
    def preempt_all(self, data: st.DataObject, count: int) -> None:
        """Preempt all that run and go on: who resumes may find what another cached again."""
        self.reset(data, running=True)
        if not self.stopped:
            self.run_steps(data, count)

    @precondition(lambda self: not self.stopped)
    @rule(state=st.sampled_from([0, 0, 1, 2]))
    def pause(self, state: int) -> None:
        """Set the pause state."""
        self.apply(["pause", state])

    @precondition(
        lambda self: not self.stopped and len(self.comparison.pending) < self.comparison.depth
    )
    @rule()
    def schedule(self) -> None:
        """Start a step whose output stays in flight."""
        self.num_steps += 1
        self.apply(["schedule", self.num_steps - 1])

    @precondition(lambda self: not self.stopped and self.comparison.pending)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Return the output of the oldest step in flight."""

        def draw(drafts: int) -> list[int]:
            accepted = data.draw(st.integers(0, drafts)) if drafts else 0
            return data.draw(sampled_tokens(accepted + 1))

        self.deliver_with(draw)

    def deliver_with(self, sample: Callable[[int], list[int]]) -> None:
        """Return the output of the oldest step; `sample` makes tokens from a number of drafts."""
        step = min(self.comparison.pending)
        entries = self.comparison.pending[step]
        sampled = [[name, [] if chunk else sample(drafts)] for name, chunk, drafts in entries]
        self.apply(["update", step, sampled])

    @precondition(lambda self: not self.stopped)
    @rule(data=st.data(), count=st.integers(1, 6))
    def run_steps(self, data: st.DataObject, count: int) -> None:
        """Several turns of the engine loop, as deep as the kind allows."""
        for _ in range(count):
            if len(self.comparison.pending) == self.comparison.depth:
                self.deliver(data)
                self.propose_drafts(data)
            if not self.stopped:
                self.schedule()
        # Some rules need a scheduler between steps.
        if not self.stopped and data.draw(st.booleans()):
            self.deliver(data)

    @precondition(lambda self: not self.stopped)
    @rule(data=st.data())
    def propose_drafts(self, data: st.DataObject) -> None:
        """Propose drafts for the next step (the asynchronous kinds make placeholders instead)."""
        if self.comparison.pending or self.comparison.depth > 1:
            return
        most = self.comparison.config["num_speculative_tokens"]
        state = self.comparison.model.model.state
        tokens = st.lists(st.sampled_from(TOKENS), min_size=0, max_size=most)
        names = [state.ids[row] for row in state.live()]
        if most and names:
            self.apply(["drafts", [[name, data.draw(tokens)] for name in names]])

    @precondition(lambda self: self.stopped)
    @rule()
    def rest(self) -> None:
        """A step that both sides refuse ends a run; Hypothesis wants something to do."""

    def teardown(self) -> None:
        """Serve what is left, as far as the kind serves everything."""
        if not hasattr(self, "comparison") or self.stopped:
            return
        self.apply(["pause", 0])
        idle = steps = 0
        while (self.comparison.pending or not self.is_idle) and not self.stopped:
            if idle > self.comparison.depth or steps > DRAIN_STEPS:
                break
            if len(self.comparison.pending) == self.comparison.depth or self.is_idle:
                self.deliver_with(lambda drafts: [TOKENS[0]] * (drafts // 2 + 1))
            if not self.is_idle and not self.stopped:
                self.schedule()
                idle = 0 if self.comparison.events[-1][2].get("total") else idle + 1
            steps += 1
        if self.runs is not None:
            self.runs.append(self.comparison.trace)


def machine(
    kind: str, policy: st.SearchStrategy[dict[str, Any]], documented: bool = False
) -> type[SchedulerMachine]:
    """Machine class of a kind, with its own coverage; `policy` is drawn for the Neuron kinds."""
    coverage = Coverage(features_of(kind, documented))
    members = {"kind": kind, "policy": policy, "coverage": coverage}
    return type(f"{kind.title().replace('_', '')}Machine", (SchedulerMachine,), members)
