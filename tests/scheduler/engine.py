"""A model of constant arithmetic and vLLM's two engine loops around a scheduler."""

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest

from segattn.scheduler import (
    ModelRunnerOutput,
    NeuronAsyncScheduler,
    NeuronPolicy,
    NeuronScheduler,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)

S = TypeVar("S", bound=Scheduler)

BOTH_LOOPS = pytest.mark.parametrize("asynchronous", [False, True])

_GENEROUS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
    "block_size": 4,
    "num_blocks": 200,
}

Model = Callable[[str, int], int]
"""The token that follows `position` tokens of a request."""


def token_at(request_id: str, position: int) -> int:
    """Depends on the position alone, so a recomputation samples the same token again."""
    return 100 + position


def base(kind: type[Scheduler] = Scheduler, **config: Any) -> Scheduler:
    """A scheduler of vLLM's rules; config fields that a test does not name are generous."""
    return kind(SchedulerConfig(**_GENEROUS | config))


def neuron(
    neuron_policy: NeuronPolicy | None = None, /, *, asynchronous: bool = False, **config: Any
) -> NeuronScheduler:
    """A Neuron scheduler; config fields that a test does not name are generous."""
    kind = NeuronAsyncScheduler if asynchronous else NeuronScheduler
    return kind(SchedulerConfig(**_GENEROUS | config), neuron_policy or NeuronPolicy())


def prompt(length: int, start: int = 1) -> list[int]:
    """A prompt of `length` different tokens."""
    return list(range(start, start + length))


class Engine(Generic[S]):
    """Steps a scheduler: `depth` 1 is the synchronous loop, 2 keeps one step in flight."""

    def __init__(self, scheduler: S, *, depth: int = 1, model: Model = token_at) -> None:
        self.scheduler = scheduler
        self.model = model
        self.tokens: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}
        self._depth = depth
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def add(
        self, request_id: str, prompt_token_ids: list[int], max_tokens: int, **more: Any
    ) -> None:
        self.scheduler.add_request(Request(request_id, prompt_token_ids, max_tokens, **more))

    def step(self) -> dict[str, int]:
        """Schedule a step and deliver the oldest one if enough are in flight."""
        output = self.schedule()
        if len(self._in_flight) >= self._depth:
            self.deliver()
        return output.num_scheduled_tokens

    def schedule(self) -> SchedulerOutput:
        """Schedule a step; its tokens are sampled now and delivered later."""
        output = self.scheduler.schedule()
        sampled = []
        for request_id in output.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            complete = not request.is_prefill_chunk
            position = request.num_computed_tokens
            sampled.append([self.model(request_id, position)] if complete else [])
        model_output = ModelRunnerOutput(list(output.num_scheduled_tokens), sampled)
        self._in_flight.append((output, model_output))
        return output

    def deliver(self) -> None:
        """Give the scheduler the tokens of the oldest step in flight."""
        for new in self.scheduler.update_from_output(*self._in_flight.popleft()):
            self.tokens.setdefault(new.request_id, []).extend(new.new_token_ids)
            if new.finish_reason is not None:
                self.finish_reasons[new.request_id] = new.finish_reason

    def drain(self) -> None:
        """Deliver all steps in flight."""
        while self._in_flight:
            self.deliver()

    def run(self, max_steps: int) -> list[dict[str, int]]:
        """Step until nothing is left to do, at most `max_steps` times; the scheduled tokens."""
        steps: list[dict[str, int]] = []
        while len(steps) < max_steps and self.scheduler.has_requests():
            steps.append(self.step())
        self.drain()
        return steps


def neuron_engine(
    neuron_policy: NeuronPolicy, /, *, asynchronous: bool = False, **config: Any
) -> Engine[NeuronScheduler]:
    """A Neuron scheduler in the loop of its kind."""
    scheduler = neuron(neuron_policy, asynchronous=asynchronous, **config)
    return Engine(scheduler, depth=2 if asynchronous else 1)
