"""What a request costs ends with it, and what it holds meanwhile is as little as is documented."""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from types import FrameType, FunctionType, ModuleType
from typing import Any

import pytest

from segattn.scheduler import (
    AsyncScheduler,
    ModelRunnerOutput,
    NeuronAsyncScheduler,
    NeuronScheduler,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
)

pytestmark = pytest.mark.usefixtures("no_garbage_collection")

KINDS: list[type[Scheduler]] = [Scheduler, AsyncScheduler, NeuronScheduler, NeuronAsyncScheduler]


def scheduler_after(kind: type[Scheduler], num_finished: int) -> Scheduler:
    """A scheduler that served so many requests; 150 leave no block uncached."""
    scheduler = kind(
        SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, block_size=4, num_blocks=65
        )
    )
    for number in range(num_finished):
        # Prompts in groups of three that begin alike.
        prompt = [number // 3] * 4 + [5] * (5 + number % 3)
        scheduler.add_request(Request(f"r{number}", prompt, 1 + number % 3))
        while scheduler.has_requests():
            step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> None:
    output = scheduler.schedule()
    requests = scheduler.requests
    sampled = [
        [] if requests[name].is_prefill_chunk else [7] for name in output.num_scheduled_tokens
    ]
    scheduler.update_from_output(
        output, ModelRunnerOutput(list(output.num_scheduled_tokens), sampled)
    )


def num_instructions(call: Callable[[], object]) -> int:
    """Bytecode instructions that `call` executes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def num_reachable(scheduler: Scheduler) -> int:
    """Objects that the scheduler holds."""
    seen: dict[int, object] = {}
    queue: list[object] = [scheduler]
    while queue:
        one = queue.pop()
        if id(one) not in seen and not isinstance(one, (type, ModuleType, FunctionType)):
            seen[id(one)] = one
            queue += gc.get_referents(one)
    return len(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_kept_of_a_request_that_ended(kind: type[Scheduler]) -> None:
    assert num_reachable(scheduler_after(kind, 150)) == num_reachable(scheduler_after(kind, 300))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_costs_the_same_however_many_requests_ended(kind: type[Scheduler]) -> None:
    costs = []
    for num_finished in (150, 300):
        scheduler = scheduler_after(kind, num_finished)
        scheduler.add_request(Request("last", [5] * 9, 4))
        costs.append([num_instructions(partial(step, scheduler)) for _ in range(4)])
        assert not scheduler.requests
    assert costs[0] == costs[1]
    assert min(costs[0]) > 100


def functions_called(call: Callable[[], object]) -> list[str]:
    """Functions of this project that `call` enters, as often as it does."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith(("segattn.scheduler.", "segattn.reference.")):
            seen.append(f"{name}.{frame.f_code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_passes_few_functions(kind: type[Scheduler]) -> None:
    scheduler = scheduler_after(kind, 0)
    for number in range(3):
        scheduler.add_request(Request(f"r{number}", [number, 5, 5, 5, 5], 30))
    is_neuron = issubclass(kind, NeuronScheduler)
    for _ in range(4 if is_neuron else 2):
        step(scheduler)
    # A decode that fills a block. Comprehensions are no functions of their own.
    seen = {name for name in functions_called(partial(step, scheduler)) if "<" not in name}
    assert len(seen) < (30 if is_neuron else 23), sorted(seen)


SIZES = pytest.mark.parametrize(("num_tokens", "block_size"), [(64, 16), (4096, 16), (4096, 128)])


def scheduler_for(block_size: int) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=8192,
            max_model_len=8192,
            block_size=block_size,
            num_blocks=2000,
        )
    )


def num_bytes_of_adding(scheduler: Scheduler, request: Request) -> int:
    """Memory that a waiting request holds, its prompt excepted: that is the caller's list."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    scheduler.add_request(request)
    waiting, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return waiting - before


@SIZES
def test_a_request_holds_what_is_documented(num_tokens: int, block_size: int) -> None:
    scheduler = scheduler_for(block_size)
    num_blocks = num_tokens // block_size
    prompt = list(range(3, num_tokens + 3))
    # docs/decisions.md: a digest of 65 bytes and its list entry per full block, and below 2 KiB.
    held = num_bytes_of_adding(scheduler, Request("a", prompt, 100))
    assert held < 2048 + num_blocks * (65 + 9)
    step(scheduler)
    # 8 bytes per block of its table.
    (request,) = scheduler.running
    assert sys.getsizeof(request.block_ids) < 128 + 9 * num_blocks


def test_an_abort_costs_the_same_for_each_of_many_requests() -> None:
    costs = []
    for num_requests in (50, 200):
        scheduler = scheduler_after(Scheduler, 0)
        for number in range(num_requests):
            scheduler.add_request(Request(f"r{number}", [number], 1))
        tracemalloc.start()
        scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
        costs.append(tracemalloc.get_traced_memory()[1] / num_requests)
        tracemalloc.stop()
        assert not scheduler.requests
    assert costs[1] < 1.5 * costs[0]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_function_is_called_for_each_aborted_request(kind: type[Scheduler], policy: str) -> None:
    calls = []
    for num_aborts in (2, 60):
        scheduler = kind(
            SchedulerConfig(
                max_num_seqs=64,
                max_num_batched_tokens=512,
                max_model_len=64,
                block_size=4,
                num_blocks=1025,
                policy=policy,
            )
        )
        for number in range(200):
            scheduler.add_request(Request(f"r{number:03}", [number, 5, 5, 5, 5], 30))
        while len(scheduler.running) < 64:
            step(scheduler)
        # Running ones and waiting ones.
        ids = [f"r{number:03}" for number in (*range(num_aborts), *range(100, 100 + num_aborts))]
        abort = partial(scheduler.finish_requests, ids, RequestStatus.FINISHED_ABORTED)
        calls.append([name for name in functions_called(abort) if "<" not in name])
        scheduler.check_integrity()
        assert len(scheduler.requests) == 200 - 2 * num_aborts
    assert calls[0] == calls[1]
    assert len(calls[0]) < 10, calls[0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_among_many_waiting_requests_costs_what_it_does_among_few(
    kind: type[Scheduler],
) -> None:
    costs = []
    for num_waiting in (10, 1000):
        scheduler = scheduler_after(kind, 0)
        for number in range(num_waiting):
            scheduler.add_request(Request(f"r{number}", [number, 5, 5, 5, 5], 30))
        step(scheduler)
        for name in ("r0", "r7"):  # the one that runs, and one in the middle of the queue
            abort = partial(scheduler.finish_requests, name, RequestStatus.FINISHED_ABORTED)
            costs.append(num_instructions(abort))
    assert costs[:2] == costs[2:]
