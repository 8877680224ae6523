"""The engine with a step in flight while the next is prepared: same tokens, and a real overlap."""

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segattn import kernels
from segattn.runner.engine import Engine
from segattn.runner.llama import Llama
from segattn.runner.model_runner import ModelRunner
from segattn.scheduler import NeuronPolicy, Request, SchedulerConfig
from segattn.tests.runner import numpy_kernels
from segattn.tests.runner.random_model import random_model

MODEL = random_model()


@pytest.fixture(autouse=True, scope="module")
def quick_kernels() -> Iterator[None]:
    """Thousands of steps need quick kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for name in numpy_kernels.NAMES:
            patch.setattr(kernels, name, getattr(numpy_kernels, name))
        yield


def make_engine(neuron_policy: NeuronPolicy | None = None, **changed: Any) -> Engine:
    """Asynchronous unless `changed` says otherwise."""
    config: dict[str, Any] = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 24,
        "max_model_len": 64,
        "block_size": 16,
        "num_blocks": 14,
    }
    asynchronous = changed.pop("async_scheduling", True)
    scheduling = SchedulerConfig(**(config | changed))
    return Engine(MODEL, scheduling, policy=neuron_policy, async_scheduling=asynchronous)


POLICIES = (NeuronPolicy(), NeuronPolicy(max_consecutive_prefills=1))

ACTIONS = st.one_of(
    st.just(("step", 0)),
    st.just(("step", 0)),
    st.tuples(st.just("add"), st.integers(1, 50)),
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("reset"), st.booleans()),
)


@settings(max_examples=40)
@given(
    actions=st.lists(ACTIONS, min_size=3, max_size=25),
    policy=st.sampled_from(POLICIES),
    queue=st.sampled_from(["fcfs", "priority"]),
    num_blocks=st.integers(5, 14),
)
def test_tokens_are_those_of_a_request_served_alone_whatever_happens(
    actions: list[tuple[str, int]], policy: NeuronPolicy, queue: str, num_blocks: int
) -> None:
    engine = make_engine(policy, policy=queue, num_blocks=num_blocks)
    prompts: dict[str, list[int]] = {}
    aborted = set()
    for action, number in actions:
        match action:
            case "add":
                name = f"r{len(prompts)}"
                # Multiples of a few numbers, so that prompts share prefixes.
                prompts[name] = [3 + number % 2 + index % 7 for index in range(number)]
                request = Request(name, prompts[name], 4, priority=number % 3)
                engine.add_request(request)
            case "step" if engine.has_requests():
                engine.step()
            case "abort":
                aborted |= set(engine.abort([f"r{number}"]))
            case "reset":
                engine.scheduler.reset_prefix_cache(reset_running_requests=bool(number))
    list(engine.run())
    engine.scheduler.check_integrity()
    for name, prompt in prompts.items():
        completion = engine.completions[name]
        expected = _alone(tuple(prompt))
        if name in aborted:
            assert completion.finish_reason == "abort"
            assert completion.token_ids == expected[: len(completion.token_ids)]
        else:
            assert (completion.token_ids, completion.finish_reason) == (expected, "length")


_EXPECTED: dict[tuple[int, ...], list[int]] = {}


def _alone(prompt: tuple[int, ...]) -> list[int]:
    if prompt not in _EXPECTED:
        engine = make_engine(async_scheduling=False)
        engine.add_request(Request("alone", list(prompt), 4))
        list(engine.run())
        _EXPECTED[prompt] = engine.completions["alone"].token_ids
    return _EXPECTED[prompt]


def test_the_next_step_is_prepared_while_a_graph_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each graph waits until the step behind it is prepared: a loop without overlap would hang."""
    engine = make_engine()
    engine.add_request(Request("a", [5] * 20, 8))
    forward, submit = Llama.forward, ModelRunner.submit
    submitted, num_submitted = threading.Semaphore(0), 0

    def wait_for_the_next(model: Llama, *rest: Any) -> Any:
        assert submitted.acquire(timeout=60), "no step was prepared meanwhile"
        return forward(model, *rest)

    def tell(runner: ModelRunner, scheduled: Any) -> Any:
        nonlocal num_submitted
        launch = submit(runner, scheduled)
        if num_submitted:
            submitted.release()
        num_submitted += 1
        return launch

    monkeypatch.setattr(ModelRunner, "submit", tell)
    monkeypatch.setattr(Llama, "forward", wait_for_the_next)
    steps = []
    while engine.has_requests():
        if not engine.scheduler.has_requests():
            submitted.release()  # nothing comes behind the last one
        steps.append(engine.step())
    monkeypatch.undo()
    done = [step for step in steps if step is not None]
    assert engine.completions["a"].token_ids == _alone_for(8)
    # The timeline shows it: the host has prepared a step before the graph in front of it ends.
    overlaps = [
        after.start_seconds + after.prepare_seconds <= before.run_start_seconds + before.run_seconds
        for before, after in pairwise(done)
    ]
    assert sum(overlaps) >= 6


def _alone_for(max_tokens: int) -> list[int]:
    engine = make_engine(async_scheduling=False)
    engine.add_request(Request("a", [5] * 20, max_tokens))
    list(engine.run())
    return engine.completions["a"].token_ids


def test_a_batch_that_did_not_change_takes_its_tokens_from_the_step_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    collected_early = []
    submit, collect = ModelRunner.submit, ModelRunner.collect
    depth = 0

    def noted_submit(runner: ModelRunner, scheduled: Any) -> Any:
        nonlocal depth
        depth += 1
        launch = submit(runner, scheduled)
        depth -= 1
        return launch

    def noted_collect(runner: ModelRunner, launch: Any) -> Any:
        if depth:
            collected_early.append(launch.req_ids)
        return collect(runner, launch)

    monkeypatch.setattr(ModelRunner, "submit", noted_submit)
    monkeypatch.setattr(ModelRunner, "collect", noted_collect)
    engine.add_request(Request("a", [5] * 20, 8))
    for _ in range(4):
        engine.step()
    # The first decode follows its own prefill, the others a decode of the same request.
    assert collected_early == []
    engine.add_request(Request("b", [6] * 20, 8))
    list(engine.run())
    # A decode of a and b behind the prefill of b has to wait for b's token; so has the one behind
    # the last decode of both.
    assert collected_early[0] == ["b"]
    assert len(collected_early) <= 2


def test_drafts_are_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens=2: must be 0 with async_sched"):
        make_engine(num_speculative_tokens=2)
