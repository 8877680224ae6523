"""Steps that fail at any call and with any exception: nobody loses a token or gets a wrong one."""

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from inspect import CO_GENERATOR
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from segattn import kernels
from segattn.runner.engine import Engine
from segattn.runner.llama import Llama
from segattn.scheduler import Request, SchedulerConfig
from segattn.tests.runner import numpy_kernels
from segattn.tests.runner.random_model import CONFIG, random_weights

ROOT = Path(kernels.__file__).parents[1]
WATCHED = tuple(str(ROOT / name) for name in ("scheduler", "runner", "tests/runner/numpy_kernels"))
WEIGHTS = random_weights()
MODEL = Llama(replace(CONFIG, num_layers=1), replace(WEIGHTS, layers=WEIGHTS.layers[:1]))
STEM = [7, 3, 9, 4] * 8
PROMPTS = {"a": [*STEM, 5], "b": [*STEM, 6, 8], "c": [11] * 20, "d": [*STEM, 5, 1]}
ERRORS = (OSError, MemoryError, ValueError, KeyboardInterrupt)
PARTS = {
    "scheduler": {"NeuronScheduler.schedule", "receive", "KVCacheManager.admit", "BlockPool.take"},
    "runner": {"ModelRunner._run"},
    "model": {"Llama.forward"},
    "cache": {"PagedKVCache.attention"},
    "kernels": {"paged_decode"},
    "sampler": {"verify"},
}
"""What a step consists of, with functions of each that must be among those that fail."""
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"async_scheduling": True},
    "drafts": {"propose": lambda tokens, k: tokens[-8:][:k]},
}


@pytest.fixture(autouse=True)
def quick_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of steps need quick kernels."""
    for name in numpy_kernels.NAMES:
        monkeypatch.setattr(kernels, name, getattr(numpy_kernels, name))


def make_engine(mode: str) -> Engine:
    """Chunks of 24 tokens, and few blocks: requests wait, and prefixes are shared and evicted."""
    config = SchedulerConfig(
        max_num_seqs=3, max_num_batched_tokens=24, max_model_len=64, block_size=16, num_blocks=14,
        num_speculative_tokens=2 if mode == "drafts" else 0,
    )  # fmt: skip
    return Engine(MODEL, config, **MODES[mode])


def serve(
    engine: Engine, names: str, step: Callable[[], object] | None = None
) -> dict[str, list[int]]:
    """Serve some prompts to their end; their tokens."""
    for name in names:
        engine.add_request(Request(name, PROMPTS[name[0]], 5))
    num_steps = 0
    while engine.has_requests():
        (step or engine.step)()
        num_steps += 1
        assert num_steps < 200, "no progress"
    engine.scheduler.check_integrity()
    return {name: engine.completions[name].token_ids for name in names}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Tokens of runs in which nothing fails and nothing is shared."""
    with pytest.MonkeyPatch.context() as patch:
        for name in numpy_kernels.NAMES:
            patch.setattr(kernels, name, getattr(numpy_kernels, name))
        return {name: serve(make_engine("sync"), name)[name] for name in PROMPTS}


class Fault:
    """Raises at one of the calls that steps make in the watched folders, counted from 0."""

    def __init__(self, index: int | None = None, error: type[BaseException] = OSError) -> None:
        self.calls: list[str] = []
        self._counter = count()  # of all threads
        self.index = index
        self.error = error

    def step(self, engine: Engine) -> object:
        """A step of the engine under watch; an interrupt ends here, as in a server's loop."""
        sys.settrace(self._watch)
        # The thread of an asynchronous runner starts in its first step.
        threading.settrace(self._watch)
        try:
            return engine.step()
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(None)
            threading.settrace(None)

    def _watch(self, frame: FrameType, event: str, _: object) -> None:
        if (
            event == "call"
            and frame.f_code.co_filename.startswith(WATCHED)
            and frame.f_code.co_qualname != "Engine.step"  # the call itself
            # One that any() or all() leaves is closed, which is a call too and raises nothing.
            and not frame.f_code.co_flags & CO_GENERATOR
        ):
            self.calls.append(frame.f_code.co_qualname)
            if next(self._counter) == self.index:
                sys.settrace(None)
                raise self.error("injected")


def run_with(fault: Fault, mode: str, expected: dict[str, list[int]]) -> None:
    engine = make_engine(mode)
    tokens = serve(engine, "abc", lambda: fault.step(engine))
    assert tokens == {name: expected[name] for name in "abc"}, (fault.calls[-1:], fault.error)
    fault.index = None  # the runner's thread is still watched
    # What the failed step left behind is found by nobody.
    assert serve(engine, "d") == {"d": expected["d"]}, (fault.calls[-1:], fault.error)
    reasons = {engine.completions[name].finish_reason for name in "abcd"}
    assert reasons == {"length"}, (fault.calls[-1:], fault.error)


@pytest.mark.parametrize("mode", MODES)
def test_a_failure_at_any_function_of_a_step_costs_no_token(
    mode: str, expected: dict[str, list[int]]
) -> None:
    clean = Fault()
    run_with(clean, mode, expected)
    calls: dict[str, list[int]] = {}
    for index, name in enumerate(clean.calls):
        calls.setdefault(name, []).append(index)
    expected_parts = set().union(*PARTS.values()) - ({"verify"} if mode == "async" else set())
    assert expected_parts - calls.keys() == set()
    # The first call of a function, one in the middle or the last one. Two kinds of error in each
    # mode, so that a function that all modes pass fails with every kind.
    offset = list(MODES).index(mode)
    for turn, indices in enumerate(calls.values()):
        for number in (offset, offset + 2):
            index = (indices[0], indices[len(indices) // 2], indices[-1])[(turn + number) % 3]
            run_with(Fault(index, ERRORS[number % 4]), mode, expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_fails_again_ends_its_requests_alone(
    mode: str, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(mode)
    forward = Llama.forward

    def fail_on_c(model: Llama, input_ids: Any, *rest: Any) -> Any:
        if 11 in input_ids:
            raise OSError("device lost")
        return forward(model, input_ids, *rest)

    monkeypatch.setattr(Llama, "forward", fail_on_c)
    tokens = serve(engine, "abc")
    assert tokens == {"a": expected["a"], "b": expected["b"], "c": []}
    completion = engine.completions["c"]
    assert (completion.finish_reason, completion.error) == ("error", "OSError: device lost")
    assert engine.completions["a"].error is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", [1, 3, 6])
def test_a_row_that_is_not_finite_ends_its_request_alone_and_is_found_by_nobody(
    mode: str, call: int, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(mode)
    forward, num_calls, poisoned = Llama.forward, 0, []

    def poison(model: Llama, input_ids: Any, *rest: Any) -> Any:
        nonlocal num_calls
        hidden = forward(model, input_ids, *rest)
        num_calls += 1
        if num_calls == call:
            hidden[0] = np.nan
            poisoned.append(True)
        return hidden

    monkeypatch.setattr(Llama, "forward", poison)
    tokens = serve(engine, "abc")
    assert poisoned
    (bad,) = [name for name in "abc" if engine.completions[name].finish_reason == "error"]
    assert engine.completions[bad].error == "its hidden states or logits are not finite"
    assert {n: tokens[n] for n in "abc" if n != bad} == {n: expected[n] for n in "abc" if n != bad}
    # The same prompt again, whatever the prefix cache holds of it.
    assert serve(engine, "d") == {"d": expected["d"]}
    engine.completions.pop(bad)
    assert serve(engine, bad) == {bad: expected[bad]}


def test_a_scheduler_that_fails_twice_in_a_row_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine("sync")
    engine.add_request(Request("a", PROMPTS["a"], 5))

    def fail() -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", fail)
        assert engine.step() is None
        with pytest.raises(MemoryError, match="no room"):
            engine.step()
    list(engine.run())
    assert engine.completions["a"].finish_reason == "length"


def test_a_shape_that_is_missing_ends_the_requests_that_need_it(
    expected: dict[str, list[int]],
) -> None:
    engine = make_engine("sync")
    plan = engine.plan
    plan._members = frozenset(shape for shape in plan.shapes if shape.kind != "segmented_prefill")
    # Prompts longer than a chunk of 24 need it, and so does a prefix-cache hit.
    tokens = serve(engine, "acb")
    assert tokens == {"a": [], "b": [], "c": expected["c"]}
    error = engine.completions["a"].error
    assert error is not None
    assert "is not in the compile plan" in error


@pytest.mark.parametrize("mode", MODES)
def test_aborted_requests_end_at_once_and_others_go_on(
    mode: str, expected: dict[str, list[int]]
) -> None:
    for num_steps in range(8):
        engine = make_engine(mode)
        for name in "abc":
            engine.add_request(Request(name, PROMPTS[name], 5))
        for _ in range(num_steps):
            engine.step()
        is_over = engine.completions["b"].finish_reason is not None
        assert engine.abort(["b", "unknown"]) == ([] if is_over else ["b"])
        produced = list(engine.completions["b"].token_ids)
        assert engine.completions["b"].finish_reason == ("length" if is_over else "abort")
        tokens = serve(engine, "d")
        assert tokens == {"d": expected["d"]}
        assert engine.completions["b"].token_ids == produced
        assert [engine.completions[name].token_ids for name in "ac"] == [
            expected["a"],
            expected["c"],
        ]
