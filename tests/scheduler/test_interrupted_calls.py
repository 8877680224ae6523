"""A call that is interrupted at any line leaves no step, block or request half changed."""

import linecache
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest

import segattn.scheduler
from segattn.scheduler import (
    AsyncScheduler,
    EngineCoreOutput,
    ModelRunnerOutput,
    NeuronAsyncScheduler,
    NeuronScheduler,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)

pytestmark = pytest.mark.usefixtures("no_garbage_collection")

T = TypeVar("T")

PACKAGE = str(Path(segattn.scheduler.__file__).parent)
KINDS: list[type[Scheduler]] = [Scheduler, AsyncScheduler, NeuronScheduler, NeuronAsyncScheduler]
UNTOUCHED = ("recovery.py", "integrity.py", "validation.py")
"""Interrupting the recovery itself is not the subject."""
PROMPTS = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7, 8], [9, 8, 7], [9, 8, 7], [1, 2, 3, 4, 5, 6]]


CALLS = ("schedule", "update_from_output", "finish_requests", "reset_prefix_cache")


class InjectedError(BaseException):
    """The interrupt that a test puts into a call; no `except Exception` sees it."""


def call_with_failing_line(number: int, call: Callable[[], T]) -> T:
    """Run `call` with an exception before its `number`-th line; its result if it has fewer."""
    count = 0
    is_over = False

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count, is_over
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) or file.endswith(UNTOUCHED):
            return None
        line = linecache.getline(file, frame.f_lineno).strip()
        # A recovery has begun, or the call has done all that it does.
        is_outermost = frame.f_code.co_name in (*CALLS, "receive")
        is_over = is_over or line.startswith(("take_back(", "_restore(", "self._restore"))
        is_over = is_over or (is_outermost and line.startswith("return"))
        if event == "line" and not is_over and not line.startswith(("with ", "try", "except")):
            count += 1
            if count == number:
                is_over = True
                raise InjectedError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(before)


def after_interrupts(
    scheduler: Scheduler, stride: int, check: Callable[[], None], call: Callable[[], T]
) -> tuple[T, int]:
    """Interrupt the call at every `stride`-th line in turn, then let it be."""
    num_failures = 0
    while True:
        try:
            return call_with_failing_line(1 + num_failures * stride, call), num_failures
        except InjectedError:
            num_failures += 1
            scheduler.check_integrity()
            check()


def sample(scheduler: Scheduler, output: SchedulerOutput) -> ModelRunnerOutput:
    """Each token is its own position; half of the drafts are accepted."""
    drafts = output.scheduled_spec_decode_tokens
    rows = []
    for name in output.num_scheduled_tokens:
        request = scheduler.requests[name]
        num_drafts = len(drafts.get(name, ()))
        first = request.num_computed_tokens - num_drafts
        rows.append(list(range(first, first + 1 + num_drafts // 2)))
        if request.is_prefill_chunk:
            rows[-1] = []
    return ModelRunnerOutput(list(output.num_scheduled_tokens), rows)


def counters(scheduler: Scheduler) -> dict[str, tuple[Any, ...]]:
    return {
        name: (
            request.status,
            request.output_token_ids.copy(),
            request.num_computed_tokens,
            request.num_in_flight_tokens,
            request.num_output_placeholders,
            request.block_ids.copy(),
        )
        for name, request in scheduler.requests.items()
    }


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_steps_change_no_text(kind: type[Scheduler], policy: str) -> None:
    # Admission, chunks, prefix hits, eviction, preemption, resumption, drafts and ends.
    # What an asynchronous step samples depends on drafts whose outcome is not known yet.
    num_drafts = 0 if kind.is_async else 1
    scheduler = kind(
        SchedulerConfig(4, 8, 32, 2, 12, policy=policy, num_speculative_tokens=num_drafts)
    )
    for number, tokens in enumerate(PROMPTS):
        scheduler.add_request(Request(f"r{number}", tokens, 4, priority=-number))
    depth = 2 if scheduler.is_async else 1
    in_flight: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
    tokens_of: dict[str, list[int]] = {f"r{number}": [] for number in range(len(PROMPTS))}
    num_failures = num_steps = 0
    while scheduler.has_requests() and num_steps < 200:
        num_steps += 1
        before = counters(scheduler)

        def unscheduled(before: dict[str, tuple[Any, ...]] = before) -> None:
            after = counters(scheduler)
            assert after.keys() == before.keys()
            for name, (status, outputs, computed, in_flight, *_) in before.items():
                now = after[name]
                assert (now[1], now[3]) == (outputs, in_flight)
                assert now[0] is status or now[0] is RequestStatus.PREEMPTED
                assert now[2] == (computed if now[0] is status else 0)

        output, count = after_interrupts(
            scheduler, 3 + num_steps % 4, unscheduled, scheduler.schedule
        )
        num_failures += count
        in_flight.append((output, sample(scheduler, output)))
        if len(in_flight) == depth:
            before = counters(scheduler)

            def undelivered(before: dict[str, tuple[Any, ...]] = before) -> None:
                assert counters(scheduler) == before

            update: Callable[[], list[EngineCoreOutput]] = partial(
                scheduler.update_from_output, *in_flight.pop(0)
            )
            outputs, count = after_interrupts(scheduler, 2, undelivered, update)
            num_failures += count
            for new in outputs:
                tokens_of[new.request_id] += new.new_token_ids
        scheduler.check_integrity()
    expected = {
        f"r{number}": list(range(len(tokens), len(tokens) + 4))
        for number, tokens in enumerate(PROMPTS)
    }
    assert tokens_of == expected
    assert num_failures > 100


def busy(kind: type[Scheduler]) -> Scheduler:
    scheduler = kind(SchedulerConfig(4, 8, 32, 2, 14))
    for name in "abcd":
        scheduler.add_request(Request(name, [1, 2, 3], 4))
    for _ in range(3):
        output = scheduler.schedule()
        scheduler.update_from_output(output, sample(scheduler, output))
    return scheduler


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_abort_ends_what_it_began(kind: type[Scheduler]) -> None:
    number, is_over = 0, False
    while not is_over:
        scheduler, number = busy(kind), number + 1
        abort = partial(scheduler.finish_requests, ["a", "d"], RequestStatus.FINISHED_ABORTED)
        try:
            is_over = call_with_failing_line(number, abort) == ["a", "d"]
        except InjectedError:
            scheduler.check_integrity()
        ended = {"a", "d"} - scheduler.requests.keys()
        assert ended == scheduler.finished_req_ids
        assert set(scheduler.requests) == set("abcd") - ended
    assert number > 10


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_reset_preempts_what_it_began(kind: type[Scheduler]) -> None:
    number, is_over = 0, False
    while not is_over:
        scheduler, number = busy(kind), number + 1
        try:
            is_over = call_with_failing_line(
                number, partial(scheduler.reset_prefix_cache, reset_running_requests=True)
            )
        except InjectedError:
            scheduler.check_integrity()
        assert set(scheduler.requests) == set("abcd")
    assert number > 10
    assert scheduler.num_free_blocks == 13
