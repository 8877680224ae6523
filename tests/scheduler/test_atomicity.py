"""A call that fails anywhere inside leaves the scheduler as it was before."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest

import segattn.scheduler
from segattn.scheduler import (
    AsyncScheduler,
    DraftTokenIds,
    ModelRunnerOutput,
    NeuronAsyncScheduler,
    NeuronPolicy,
    NeuronScheduler,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)
from segattn.tests.scheduler.base import add, make, update
from segattn.tests.scheduler.state import differences, state_of

T = TypeVar("T")

PACKAGE = str(Path(segattn.scheduler.__file__).parent)

NOT_INSIDE = {
    # The calls themselves, and the frame of the transaction: the call is over when it returns.
    "schedule",
    "update_from_output",
    "finish_requests",
    "reset_prefix_cache",
    "__enter__",
    "__exit__",
}


class InjectedError(Exception):
    """The failure that a test puts into a call."""


def call_with_failure(number: int, call: Callable[[], T]) -> T:
    """Run `call` with an exception at its `number`-th inner call; its result if it has fewer."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_name not in NOT_INSIDE:
            count += 1
            if count == number:
                raise InjectedError

    sys.setprofile(profile)
    try:
        return call()
    finally:
        sys.setprofile(None)


def call_after_every_failure(
    scheduler: Scheduler, call: Callable[..., T], *arguments: object
) -> tuple[T, int]:
    """Fail at each inner call in turn, then succeed: the result, and how many failures were undone.

    The same scheduler goes through all of them, so what an undo forgot would also show later.
    """
    before = state_of((scheduler, arguments))
    number = 0
    while True:
        number += 1
        try:
            result = call_with_failure(number, lambda: call(*arguments))
        except InjectedError:
            after = state_of((scheduler, arguments))
            assert before == after, f"inner call {number}: {differences(before, after)}"
            scheduler.check_integrity()
        else:
            return result, number - 1


def sample(scheduler: Scheduler, output: SchedulerOutput) -> ModelRunnerOutput:
    """A token for each request whose known tokens are all scheduled, half of its drafts accepted.

    To be called before the next step is scheduled.
    """
    drafts = output.scheduled_spec_decode_tokens
    tokens = [
        []
        if scheduler.requests[request_id].is_prefill_chunk
        else [7] * (1 + len(drafts.get(request_id, ())) // 2)
        for request_id in output.num_scheduled_tokens
    ]
    return ModelRunnerOutput(list(output.num_scheduled_tokens), tokens)


def config(**change: Any) -> SchedulerConfig:
    return SchedulerConfig(
        **{
            "max_num_seqs": 4,
            "max_num_batched_tokens": 8,
            "max_model_len": 32,
            "block_size": 2,
            "num_blocks": 14,
        }
        | change
    )


KINDS: list[type[Scheduler]] = [Scheduler, AsyncScheduler, NeuronScheduler, NeuronAsyncScheduler]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_at_any_inner_call_changes_nothing(kind: type[Scheduler], policy: str) -> None:
    # Ten usable blocks of two tokens for four requests: admission, chunked prefill, prefix hits,
    # eviction, preemption, resumption, drafts and finishing all take place.
    scheduler = kind(config(policy=policy, num_speculative_tokens=1, num_blocks=11))
    if isinstance(scheduler, NeuronScheduler):
        # Room for two requests, so that prefills hide decodes and decodes have turns of their own.
        scheduler = type(scheduler)(
            replace(scheduler.config, max_model_len=12, num_blocks=13),
            NeuronPolicy(max_consecutive_prefills=1),
        )
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7, 8], [9, 8, 7], [1, 2, 3, 4, 5, 6]]
    for number, tokens in enumerate(prompts):
        scheduler.add_request(
            Request(f"r{number}", tokens, 4, priority=-number, stop_token_ids=[99])
        )
    depth = 2 if isinstance(scheduler, AsyncScheduler) else 1
    in_flight: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
    num_inner_calls = 0
    seen: set[str] = set()
    while scheduler.has_requests():
        output, num_calls = call_after_every_failure(scheduler, scheduler.schedule)
        num_inner_calls += num_calls
        seen |= features(output)
        if isinstance(scheduler, NeuronScheduler):
            seen |= {"decode turn"} if scheduler._decode_turn else set()
        in_flight.append((output, sample(scheduler, output)))
        if len(in_flight) == depth:
            arguments = in_flight.pop(0)
            _, num_calls = call_after_every_failure(
                scheduler, scheduler.update_from_output, *arguments
            )
            num_inner_calls += num_calls
            if depth == 1:
                running = [request.request_id for request in scheduler.running]
                scheduler.update_draft_token_ids(DraftTokenIds(running, [[5]] * len(running)))
        scheduler.check_integrity()
    expected = {"prefix hit", "chunk", "drafts", "finish"}
    if isinstance(scheduler, NeuronScheduler):
        assert seen == expected | {"decode turn"}
    else:
        assert seen == expected | {"preemption", "resumption"}
    assert num_inner_calls > 200


def features(output: SchedulerOutput) -> set[str]:
    cached = output.scheduled_cached_reqs
    present = {
        "prefix hit": any(new.num_computed_tokens for new in output.scheduled_new_reqs),
        "chunk": any(computed < 5 for computed in cached.num_computed_tokens),
        "drafts": bool(output.scheduled_spec_decode_tokens),
        "finish": bool(output.finished_req_ids),
        "preemption": bool(output.preempted_req_ids),
        "resumption": bool(cached.resumed_req_ids),
    }
    return {name for name, is_present in present.items() if is_present}


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_reset_or_abort_changes_nothing(kind: type[Scheduler]) -> None:
    scheduler = kind(config())
    for name in "abc":
        scheduler.add_request(Request(name, [1, 2, 3], 4))
    for _ in range(3):
        output = scheduler.schedule()
        scheduler.update_from_output(output, sample(scheduler, output))
    aborted = RequestStatus.FINISHED_ABORTED
    done, num_calls = call_after_every_failure(
        scheduler, scheduler.finish_requests, ["a", "c"], aborted
    )
    assert done == ["a", "c"]
    assert num_calls > 0
    is_reset, num_calls = call_after_every_failure(scheduler, scheduler.reset_prefix_cache, True)
    assert is_reset
    assert num_calls > 0


def test_the_common_prefix_of_a_failed_step_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(config(max_num_batched_tokens=32))
    for name, tokens in {"a": [1, 2, 3], "b": [1, 2, 4]}.items():
        scheduler.add_request(Request(name, tokens, 4))
    output = scheduler.schedule()
    assert output.num_common_prefix_blocks == [1]
    scheduler.update_from_output(output, sample(scheduler, output))
    scheduler.add_request(Request("c", [9, 9, 9], 4))
    with monkeypatch.context() as patch:
        # The last thing of a step, which has counted 0 blocks in common with "c".
        patch.setattr(Scheduler, "_note_step", call_that_fails)
        with pytest.raises(InjectedError):
            scheduler.schedule()
    scheduler.finish_requests("c", RequestStatus.FINISHED_ABORTED)
    assert scheduler.schedule().num_common_prefix_blocks == [1]


def call_that_fails(*_: object) -> None:
    raise InjectedError


def test_a_failing_update_restores_stop_reasons_and_tokens_to_discard() -> None:
    scheduler = AsyncScheduler(config(max_num_batched_tokens=32))
    for name in "abc":
        scheduler.add_request(Request(name, [1, 2, 3], 8, stop_token_ids=[7], min_tokens=2))
    first, second = scheduler.schedule(), scheduler.schedule()
    outputs = [sample(scheduler, step) for step in (first, second)]
    call_after_every_failure(scheduler, scheduler.update_from_output, first, outputs[0])
    ended, num_calls = call_after_every_failure(
        scheduler, scheduler.update_from_output, second, outputs[1]
    )
    assert [output.stop_reason for output in ended] == [7, 7, 7]
    assert num_calls > 0
    for name in "def":
        scheduler.add_request(Request(name, [1, 2, 3], 8))
    first = scheduler.schedule()
    output = sample(scheduler, first)
    call_after_every_failure(scheduler, scheduler.reset_prefix_cache, True)
    scheduler.schedule()
    discarded, num_calls = call_after_every_failure(
        scheduler, scheduler.update_from_output, first, output
    )
    assert discarded == []
    assert num_calls > 0


def test_an_output_that_lacks_a_request_is_refused_as_a_whole() -> None:
    scheduler = Scheduler(config())
    for name in "ab":
        scheduler.add_request(Request(name, [1, 2, 3], 1))
    output = scheduler.schedule()
    before = state_of(scheduler)
    with pytest.raises(ValueError, match="lacks 'b'"):
        scheduler.update_from_output(output, ModelRunnerOutput(["a"], [[7]]))
    with pytest.raises(ValueError, match="2 req_ids but 1 sampled_token_ids"):
        scheduler.update_from_output(output, ModelRunnerOutput(["a", "b"], [[7]]))
    assert state_of(scheduler) == before
    scheduler.update_from_output(output, ModelRunnerOutput(["b", "a"], [[8], [7]]))
    assert scheduler.requests == {}


def test_an_async_output_with_more_tokens_than_are_in_flight_is_refused() -> None:
    scheduler = AsyncScheduler(config(num_speculative_tokens=1))
    scheduler.add_request(Request("a", [1, 2, 3], 9))
    scheduler.schedule()
    output = scheduler.schedule()  # with a draft
    scheduler.update_from_output(output, ModelRunnerOutput(["a"], [[7, 8]]))
    before = state_of(scheduler)
    with pytest.raises(ValueError, match="at most 1 tokens, so many are in flight"):
        scheduler.update_from_output(output, ModelRunnerOutput(["a"], [[7, 8]]))
    assert state_of(scheduler) == before


def test_blocks_that_a_running_request_got_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make()
    a = add(scheduler, "a", 4)  # fills its block of 4
    update(scheduler, scheduler.schedule(), a=7)
    before, blocks, num_free = state_of(scheduler), a.block_ids.copy(), scheduler.num_free_blocks

    def fail(*args: object) -> None:
        assert len(a.block_ids) == len(blocks) + 1
        raise InjectedError

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.kv_cache_manager, "cache_blocks", fail)
        with pytest.raises(InjectedError):
            scheduler.schedule()
    assert (a.block_ids, scheduler.num_free_blocks) == (blocks, num_free)
    assert not differences(before, state_of(scheduler))
    update(scheduler, scheduler.schedule(), a=7)
