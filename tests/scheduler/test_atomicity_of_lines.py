"""A failure at any line of a call, between two changes too, leaves the scheduler as it was."""

import linecache
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import pytest

from segattn.scheduler import AsyncScheduler, Request, RequestStatus, Scheduler
from segattn.tests.scheduler.state import differences, state_of
from segattn.tests.scheduler.test_atomicity import KINDS, PACKAGE, InjectedError, config, sample

T = TypeVar("T")


def call_with_failing_line(number: int, call: Callable[[], T]) -> T:
    """Run `call` with an exception before its `number`-th line; its result if it has fewer."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) or file.endswith("transaction.py"):
            return None
        # The end of a `with` is an event of its line too, when the call is over.
        is_with = linecache.getline(file, frame.f_lineno).lstrip().startswith("with ")
        if event == "line" and not is_with:
            count += 1
            if count == number:
                raise InjectedError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(before)


def call_after_failing_lines(
    scheduler: Scheduler, stride: int, call: Callable[..., T], *arguments: object
) -> tuple[T, int]:
    """Fail at every `stride`-th line in turn, then succeed: the result, and the failures."""
    before = state_of((scheduler, arguments))
    num_failures = 0
    while True:
        try:
            number = 1 + num_failures * stride
            result = call_with_failing_line(number, partial(call, *arguments))
        except InjectedError:
            num_failures += 1
            after = state_of((scheduler, arguments))
            assert before == after, f"line event {number}: {differences(before, after)}"
        else:
            return result, num_failures


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_at_any_line_changes_nothing(kind: type[Scheduler], policy: str) -> None:
    # Admission, chunks, prefix hits, eviction, preemption, resumption, drafts and ends, as in
    # test_atomicity, and more ends in one step.
    scheduler = kind(config(policy=policy, num_speculative_tokens=1, num_blocks=11))
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7, 8], [9, 8, 7], [9, 8, 7], [1, 2, 3, 4, 5, 6]]
    for number, tokens in enumerate(prompts):
        scheduler.add_request(Request(f"r{number}", tokens, 3, priority=-number))
    depth = 2 if isinstance(scheduler, AsyncScheduler) else 1
    in_flight: list[Any] = []
    num_failures = num_steps = 0
    while scheduler.has_requests():
        num_steps += 1
        # Another set of lines in each step.
        stride = 5 + num_steps % 4
        output, count = call_after_failing_lines(scheduler, stride, scheduler.schedule)
        num_failures += count
        in_flight.append((output, sample(scheduler, output)))
        if len(in_flight) == depth:
            _, count = call_after_failing_lines(
                scheduler, 2, scheduler.update_from_output, *in_flight.pop(0)
            )
            num_failures += count
        scheduler.check_integrity()
    assert num_failures > 300


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_at_any_line_of_a_reset_or_an_abort_changes_nothing(
    kind: type[Scheduler],
) -> None:
    scheduler = kind(config())
    for name in "abcd":
        scheduler.add_request(Request(name, [1, 2, 3], 4))
    for _ in range(3):
        output = scheduler.schedule()
        scheduler.update_from_output(output, sample(scheduler, output))
    done, num_failures = call_after_failing_lines(
        scheduler, 1, scheduler.finish_requests, ["a", "d"], RequestStatus.FINISHED_ABORTED
    )
    assert done == ["a", "d"]
    assert list(scheduler.requests) == ["b", "c"]
    assert num_failures > 10
    is_reset, num_failures = call_after_failing_lines(
        scheduler, 1, scheduler.reset_prefix_cache, True
    )
    assert is_reset
    assert num_failures > 10
