"""The rules of the base scheduler, each with numbers worked out by hand.

Blocks are numbered from 1 (0 is the null block) and taken in that order. Unless a test says
otherwise a block holds 4 tokens.
"""

import gc
from typing import Any

import pytest

from segattn.scheduler import (
    Admission,
    AsyncScheduler,
    DraftTokenIds,
    EngineCoreOutput,
    ModelRunnerOutput,
    PauseState,
    Request,
    RequestError,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)


def make(kind: type[Scheduler] = Scheduler, **change: Any) -> Scheduler:
    given: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 33,
    }
    return kind(SchedulerConfig(**given | change))


def add(scheduler: Scheduler, name: str, prompt: int | list[int], **more: Any) -> Request:
    """Add a request; a prompt given as a length has tokens that no other request has."""
    if isinstance(prompt, int):
        prompt = [1000 * ord(name[0]) + position for position in range(prompt)]
    request = Request(name, prompt, **({"max_tokens": 16} | more))
    scheduler.add_request(request)
    return request


def update(
    scheduler: Scheduler, output: SchedulerOutput, **tokens: int | list[int]
) -> list[EngineCoreOutput]:
    """Deliver the step; requests without tokens here got none."""
    given = [tokens.get(name, []) for name in output.num_scheduled_tokens]
    sampled = [[value] if isinstance(value, int) else value for value in given]
    outputs = scheduler.update_from_output(
        output, ModelRunnerOutput(list(output.num_scheduled_tokens), sampled)
    )
    scheduler.check_integrity()
    return outputs


def names(requests: Any) -> list[str]:
    return [request.request_id for request in requests]


def test_running_requests_come_first_and_share_the_budget_with_waiting_ones() -> None:
    scheduler = make(max_num_batched_tokens=10)
    add(scheduler, "a", 7)
    add(scheduler, "b", 9)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 7, "b": 3}
    assert scheduler.schedule().num_scheduled_tokens == {"b": 6}


def test_a_decode_takes_one_token_before_a_prompt_gets_the_rest() -> None:
    scheduler = make(max_num_batched_tokens=10)
    add(scheduler, "a", 7)
    update(scheduler, scheduler.schedule(), a=5)
    add(scheduler, "b", 20)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 1, "b": 9}
    assert output.total_num_scheduled_tokens == 10


def test_a_long_prompt_is_cut_at_the_threshold() -> None:
    scheduler = make(long_prefill_token_threshold=6)
    add(scheduler, "a", 10)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 6}
    assert scheduler.schedule().num_scheduled_tokens == {"a": 4}


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it() -> None:
    scheduler = make(enable_chunked_prefill=False, max_num_seqs=2)
    add(scheduler, "a", 60)
    add(scheduler, "b", 5)
    add(scheduler, "c", 4)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 60}
    assert scheduler.waiting_reasons() == {"b": Admission.TOKEN_BUDGET, "c": Admission.BEHIND}


def test_at_most_max_num_seqs_run() -> None:
    scheduler = make(max_num_seqs=2)
    for name in "abcd":
        add(scheduler, name, 3)
    assert list(scheduler.schedule().num_scheduled_tokens) == ["a", "b"]
    assert scheduler.waiting_reasons() == {"c": Admission.MAX_NUM_SEQS, "d": Admission.BEHIND}
    assert scheduler.admission_counts[Admission.MAX_NUM_SEQS] == 1
    assert scheduler.admission_counts[Admission.BEHIND] == 1


def test_blocks_are_given_when_they_are_needed() -> None:
    scheduler = make()
    add(scheduler, "a", 7)
    output = scheduler.schedule()
    assert output.scheduled_new_reqs[0].block_ids == ([1, 2],)
    update(scheduler, output, a=5)
    # The eighth token fits block 2, the ninth does not.
    output = scheduler.schedule()
    assert output.scheduled_cached_reqs.new_block_ids == [None]
    update(scheduler, output, a=5)
    output = scheduler.schedule()
    assert output.scheduled_cached_reqs.new_block_ids == [([3],)]
    assert output.scheduled_cached_reqs.num_computed_tokens == [8]
    assert output.scheduled_cached_reqs.num_output_tokens == [2]


def test_lookahead_tokens_take_slots_too() -> None:
    scheduler = make(num_lookahead_tokens=2)
    add(scheduler, "a", 7)
    assert scheduler.schedule().scheduled_new_reqs[0].block_ids == ([1, 2, 3],)


def test_lookahead_ends_at_the_length_of_the_model() -> None:
    scheduler = make(num_lookahead_tokens=9, max_model_len=8)
    add(scheduler, "a", 7)
    assert scheduler.schedule().scheduled_new_reqs[0].block_ids == ([1, 2],)


def test_a_prefix_hit_ends_before_the_last_token() -> None:
    scheduler = make()
    prompt = list(range(8))
    add(scheduler, "a", prompt)
    add(scheduler, "b", prompt)
    add(scheduler, "c", [*prompt, 8])
    output = scheduler.schedule()
    # Eight tokens are two full blocks, but the second must be computed again for its last token.
    assert [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs] == [
        ("a", 0),
        ("b", 4),
        ("c", 8),
    ]
    assert [new.block_ids[0] for new in output.scheduled_new_reqs] == [[1, 2], [1, 3], [1, 2, 4]]
    assert output.num_common_prefix_blocks == [1]


def test_other_salts_and_requests_that_skip_reading_hit_nothing() -> None:
    scheduler = make()
    prompt = list(range(9))
    add(scheduler, "a", prompt, cache_salt="x")
    add(scheduler, "b", prompt, cache_salt="y")
    add(scheduler, "c", prompt)
    add(scheduler, "d", prompt, cache_salt="x", skip_reading_prefix_cache=True)
    output = scheduler.schedule()
    assert [new.num_computed_tokens for new in output.scheduled_new_reqs] == [0, 0, 0, 0]
    update(scheduler, output, a=1, b=1, c=1, d=1)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    # The blocks of "d" serve others although it did not look.
    add(scheduler, "e", prompt, cache_salt="x")
    output = scheduler.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 8


def test_prefix_caching_off_hits_nothing_and_counts_no_common_prefix() -> None:
    scheduler = make(enable_prefix_caching=False)
    for name in "ab":
        add(scheduler, name, list(range(9)))
    output = scheduler.schedule()
    assert [new.num_computed_tokens for new in output.scheduled_new_reqs] == [0, 0]
    assert output.num_common_prefix_blocks == [0]


def test_freed_blocks_queue_by_content_and_from_the_end_of_the_request() -> None:
    scheduler = make(num_blocks=8)
    add(scheduler, "a", 10)
    add(scheduler, "b", 10)
    update(scheduler, scheduler.schedule(), a=1, b=1)
    scheduler.finish_requests(["a", "b"], RequestStatus.FINISHED_ABORTED)
    # Block 7 was never used. Blocks 3 and 6 hold two tokens each: no content to find, so they go to
    # the front, the latest freed first. Full blocks go to the back, the last one of a request
    # before the others.
    assert scheduler.kv_cache_manager.block_pool.free_list() == [6, 3, 7, 2, 1, 5, 4]


def test_without_prefix_caching_the_block_freed_last_is_taken_first() -> None:
    scheduler = make(num_blocks=8, enable_prefix_caching=False)
    add(scheduler, "a", 10)
    update(scheduler, scheduler.schedule(), a=1)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert scheduler.kv_cache_manager.block_pool.free_list() == [3, 2, 1, 4, 5, 6, 7]


def test_the_latest_request_is_preempted_and_resumes_with_its_whole_text() -> None:
    scheduler = make(num_blocks=5, enable_prefix_caching=False)
    a, b = add(scheduler, "a", 7), add(scheduler, "b", 8)
    update(scheduler, scheduler.schedule(), a=1, b=2)
    # b needs a third block and none is left: it is the latest, so it preempts itself.
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 1}
    assert output.preempted_req_ids == {"b"}
    assert (b.status, b.num_computed_tokens, b.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
    assert scheduler.admission_stop is Admission.PREEMPTION
    update(scheduler, output, a=3)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    output = scheduler.schedule()
    cached = output.scheduled_cached_reqs
    assert (cached.req_ids, cached.resumed_req_ids) == (["b"], {"b"})
    assert output.num_scheduled_tokens == {"b": 9}
    assert cached.new_block_ids == [(b.block_ids,)]
    assert cached.all_token_ids == {"b": [*b.prompt_token_ids, 2]}
    assert output.finished_req_ids == {"a"}
    assert a.is_finished()


def test_the_least_important_request_is_preempted_even_if_it_was_scheduled_already() -> None:
    scheduler = make(policy="priority", num_blocks=5, enable_prefix_caching=False)
    add(scheduler, "a", 7, priority=1)
    b = add(scheduler, "b", 8, priority=0)
    # The more important request is admitted first, so it stands first in `running`.
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["b", "a"]
    update(scheduler, output, a=1, b=2)
    scheduler.running.reverse()
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"b": 1}
    assert output.preempted_req_ids == {"a"}
    assert len(b.block_ids) == 3


def test_priority_then_arrival_then_id_order_the_queue() -> None:
    scheduler = make(policy="priority", max_num_seqs=1)
    add(scheduler, "d", 3, priority=1, arrival_time=0.0)
    add(scheduler, "c", 3, priority=0, arrival_time=2.0)
    add(scheduler, "b", 3, priority=0, arrival_time=1.0)
    add(scheduler, "a", 3, priority=0, arrival_time=2.0)
    assert names(scheduler.waiting) == ["b", "a", "c", "d"]


def test_the_whole_text_must_fit_before_the_first_chunk() -> None:
    # Three usable blocks; 13 tokens need four.
    scheduler = make(num_blocks=4, max_num_batched_tokens=4)
    add(scheduler, "a", 13)
    assert scheduler.schedule().num_scheduled_tokens == {}
    assert scheduler.waiting_reasons() == {"a": Admission.KV_BLOCKS}
    scheduler = make(num_blocks=4, max_num_batched_tokens=4, scheduler_reserve_full_isl=False)
    add(scheduler, "a", 13)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 4}


def test_the_watermark_counts_only_beside_running_requests() -> None:
    # int(0.5 * 9) = 4 of 8 usable blocks stay free.
    scheduler = make(num_blocks=9, watermark=0.5)
    add(scheduler, "a", 12)
    add(scheduler, "b", 8)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 12}
    scheduler = make(num_blocks=9, watermark=0.5)
    add(scheduler, "a", 4)
    add(scheduler, "b", 12)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 4, "b": 12}


def test_the_last_position_of_the_model_is_sampled_and_not_computed() -> None:
    scheduler = make(max_model_len=8)
    add(scheduler, "a", 6)
    update(scheduler, scheduler.schedule(), a=1)
    outputs = update(scheduler, scheduler.schedule(), a=2)
    assert [(out.new_token_ids, out.finish_reason) for out in outputs] == [([2], "length")]


@pytest.mark.parametrize(
    ("more", "tokens", "reason", "stop_reason"),
    [
        ({"max_tokens": 2}, [5, 6], "length", None),
        ({"eos_token_id": 9}, [5, 9], "stop", None),
        ({"stop_token_ids": [8, 7]}, [5, 7], "stop", 7),
        ({"eos_token_id": 9, "stop_token_ids": [9]}, [9], "stop", None),
        ({"eos_token_id": 9, "min_tokens": 2}, [9, 9], "stop", None),
        ({"max_tokens": 1, "min_tokens": 3}, [5, 5, 5], "length", None),
        ({"max_tokens": 1, "eos_token_id": 5}, [5], "stop", None),
    ],
)
def test_the_first_reason_to_stop_ends_a_request(
    more: dict[str, Any], tokens: list[int], reason: str, stop_reason: int | None
) -> None:
    scheduler = make()
    request = add(scheduler, "a", 3, **more)
    seen = []
    for token in tokens:
        assert "a" in scheduler.requests
        seen += update(scheduler, scheduler.schedule(), a=token)
    assert [out.finish_reason for out in seen] == [None] * (len(tokens) - 1) + [reason]
    assert seen[-1].stop_reason == request.stop_reason == stop_reason
    assert request.output_token_ids == tokens
    assert scheduler.requests == {}
    assert scheduler.num_free_blocks == 32
    assert scheduler.has_requests()
    assert scheduler.schedule().finished_req_ids == {"a"}
    assert not scheduler.has_requests()


def test_tokens_after_the_one_that_ends_a_request_are_dropped() -> None:
    scheduler = make(num_speculative_tokens=3)
    request = add(scheduler, "a", 3, stop_token_ids=[7])
    update(scheduler, scheduler.schedule(), a=1)
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[6, 7, 8]]))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 4}
    assert output.scheduled_spec_decode_tokens == {"a": [6, 7, 8]}
    sampled = [6, 7, 8, 9]
    outputs = update(scheduler, output, a=sampled)
    assert outputs[0].new_token_ids == [6, 7]
    assert request.output_token_ids == [1, 6, 7]
    assert sampled == [6, 7, 8, 9]


def test_rejected_drafts_are_computed_again() -> None:
    scheduler = make(num_speculative_tokens=3)
    request = add(scheduler, "a", 3)
    update(scheduler, scheduler.schedule(), a=1)
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[5, 6, 7]]))
    output = scheduler.schedule()
    assert request.num_computed_tokens == 7
    # One draft accepted, the token after it sampled: positions 0..4 hold, 5 and 6 do not.
    update(scheduler, output, a=[5, 9])
    assert request.num_computed_tokens == 5
    assert request.num_tokens == 6
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}


def test_drafts_are_cut_by_the_budget_and_serve_one_step() -> None:
    scheduler = make(max_num_scheduled_tokens=4, num_speculative_tokens=3)
    request = add(scheduler, "a", 3)
    update(scheduler, scheduler.schedule(), a=1)
    add(scheduler, "b", 3)
    scheduler.update_draft_token_ids(DraftTokenIds(["a", "gone"], [[5, 6, 7, 8, 9], [1]]))
    output = scheduler.schedule()
    assert output.scheduled_spec_decode_tokens == {"a": [5, 6, 7]}
    assert request.spec_token_ids == []


def test_a_prompt_in_chunks_takes_no_drafts() -> None:
    scheduler = make(max_num_batched_tokens=4)
    request = add(scheduler, "a", 6)
    update(scheduler, scheduler.schedule())
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[5]]))
    assert request.spec_token_ids == []


def test_drafts_are_not_cached_before_they_are_accepted() -> None:
    scheduler = make(num_speculative_tokens=3)
    request = add(scheduler, "a", 3)
    update(scheduler, scheduler.schedule(), a=1)
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[5, 6, 7]]))
    scheduler.schedule()
    # Seven tokens are scheduled, four are known: one full block.
    assert request.num_cached_blocks == 1


def test_pausing_admissions_lets_running_requests_go_on() -> None:
    scheduler = make()
    add(scheduler, "a", 3)
    update(scheduler, scheduler.schedule(), a=1)
    add(scheduler, "b", 3)
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert scheduler.get_num_unfinished_requests() == 1
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}
    assert scheduler.waiting_reasons() == {"b": Admission.PAUSED}
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert scheduler.get_num_unfinished_requests() == 0
    assert not scheduler.has_requests()
    assert scheduler.schedule().num_scheduled_tokens == {}
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduler.get_num_unfinished_requests() == 2


def test_a_reset_needs_idle_blocks_or_preempts_in_running_order() -> None:
    scheduler = make()
    prompt = list(range(9))
    for name in "abc":
        add(scheduler, name, prompt)
    update(scheduler, scheduler.schedule(), a=1, b=1, c=1)
    assert not scheduler.reset_prefix_cache()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert names(scheduler.waiting) == ["a", "b", "c"]
    assert scheduler.running == []
    assert scheduler.num_free_blocks == 32
    scheduler.check_integrity()
    # "a" finds nothing any more; the others find what it computes in this step.
    assert scheduler.schedule().num_scheduled_tokens == {"a": 10, "b": 2, "c": 2}


def test_aborted_requests_free_their_blocks_and_others_are_ignored() -> None:
    scheduler = make(max_num_seqs=1)
    a, b = add(scheduler, "a", 3), add(scheduler, "b", 3)
    output = scheduler.schedule()
    done = scheduler.finish_requests(["b", "x", "a", "b"], RequestStatus.FINISHED_ABORTED)
    assert done == ["b", "a"]
    assert a.status is b.status is RequestStatus.FINISHED_ABORTED
    assert scheduler.num_free_blocks == 32
    assert update(scheduler, output, a=5) == []
    assert a.output_token_ids == []
    assert scheduler.schedule().finished_req_ids == {"a", "b"}


def test_only_a_finished_status_finishes() -> None:
    scheduler = make()
    add(scheduler, "a", 3)
    with pytest.raises(ValueError, match="finished_status"):
        scheduler.finish_requests("a", RequestStatus.PREEMPTED)
    assert "a" in scheduler.requests


def test_async_goes_on_from_a_placeholder_and_the_token_takes_its_place() -> None:
    scheduler = make(AsyncScheduler)
    request = add(scheduler, "a", 3, max_tokens=3)
    first = scheduler.schedule()
    assert request.num_output_placeholders == 1
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"a": 1}
    assert second.scheduled_cached_reqs.num_output_tokens == [1]
    assert request.num_output_placeholders == 2
    update(scheduler, first, a=5)
    assert request.num_output_placeholders == 1
    third = scheduler.schedule()
    update(scheduler, second, a=6)
    # The step in flight is certain to bring the third and last token.
    assert scheduler.schedule().num_scheduled_tokens == {}
    outputs = update(scheduler, third, a=7)
    assert outputs[0].finish_reason == "length"
    assert request.output_token_ids == [5, 6, 7]
    assert request.num_output_placeholders == 0


def test_async_drafts_are_placeholders() -> None:
    scheduler = make(AsyncScheduler, num_speculative_tokens=2)
    request = add(scheduler, "a", 3)
    first = scheduler.schedule()
    assert request.spec_token_ids == [-1, -1]
    second = scheduler.schedule()
    # One placeholder of the first step and two drafts.
    assert second.num_scheduled_tokens == {"a": 3}
    assert second.scheduled_spec_decode_tokens == {"a": [-1, -1]}
    assert request.num_output_placeholders == 4
    update(scheduler, first, a=5)
    assert (request.num_computed_tokens, request.num_output_placeholders) == (6, 3)
    # One of two drafts accepted.
    update(scheduler, second, a=[6, 7])
    assert (request.num_computed_tokens, request.num_output_placeholders) == (5, 0)


def test_tokens_in_flight_at_a_reset_are_dropped() -> None:
    scheduler = make(AsyncScheduler)
    request = add(scheduler, "a", 3)
    output = scheduler.schedule()
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert (request.async_tokens_to_discard, request.num_output_placeholders) == (1, 0)
    assert update(scheduler, output, a=5) == []
    assert request.async_tokens_to_discard == 0
    assert scheduler.schedule().num_scheduled_tokens == {"a": 3}


def test_async_caches_a_block_when_its_last_token_arrives() -> None:
    scheduler = make(AsyncScheduler)
    request = add(scheduler, "a", 3)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert (request.num_computed_tokens, request.num_cached_blocks) == (4, 0)
    update(scheduler, first, a=5)
    # The fourth token is computed by the step in flight, and now known.
    assert request.num_cached_blocks == 0
    update(scheduler, second, a=6)
    assert request.num_cached_blocks == 1


def test_deferred_prefills_wait_while_something_decodes() -> None:
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, "a", 3)
    update(scheduler, scheduler.schedule(), a=1)
    add(scheduler, "b", 3)
    output = scheduler.schedule(True)
    assert output.num_scheduled_tokens == {"a": 1}
    assert scheduler.waiting_reasons() == {"b": Admission.THROTTLED}
    assert scheduler.schedule(False).num_scheduled_tokens == {"b": 3}


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request("n", [], 1), "prompt_token_ids is empty"),
        (Request("n", [1], 0), "max_tokens=0"),
        (Request("n", [1], 1, min_tokens=-1), "min_tokens=-1"),
        (Request("n", [1, -2], 1), "must be integers within 0..2147483647"),
        (Request("n", [1, 2**31], 1), "token id 2147483648"),
        (Request("n", [1, 2**32], 1), "must be integers within 0..2147483647"),
        (Request("n", ["1"], 1), "must be integers"),  # type: ignore[list-item] # what it refuses
        (Request("a", [1], 1), "not finished yet"),
    ],
)
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_bad_requests_are_refused_and_queue_nothing(
    request_: Request, reason: str, enable_prefix_caching: bool
) -> None:
    scheduler = make(enable_prefix_caching=enable_prefix_caching)
    a = add(scheduler, "a", 3)
    with pytest.raises(RequestError, match=reason) as caught:
        scheduler.add_request(request_)
    assert caught.value.request_id == request_.request_id
    assert names(scheduler.waiting) == ["a"]
    assert list(scheduler.requests.values()) == [a]
    scheduler.check_integrity()


def test_a_request_is_used_once() -> None:
    scheduler = make()
    request = add(scheduler, "a", 3)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    with pytest.raises(RequestError, match="used before, it is FINISHED_ABORTED"):
        scheduler.add_request(request)
    add(scheduler, "a", 3)


def test_a_frame_from_before_two_resets_is_dropped() -> None:
    # vLLM 0.24 forgets the frame at the second reset and fails an assertion when it arrives.
    scheduler = make(AsyncScheduler, max_num_batched_tokens=4)
    request = add(scheduler, "a", 3, max_tokens=2)
    first, second = scheduler.schedule(), scheduler.schedule()
    update(scheduler, first, a=5)
    scheduler.reset_prefix_cache(reset_running_requests=True)
    # The four known tokens in chunks of three: nothing is sampled.
    scheduler.config = SchedulerConfig(4, 4, 64, 4, 33, long_prefill_token_threshold=3)
    third = scheduler.schedule()
    assert third.num_scheduled_tokens == {"a": 3}
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert update(scheduler, second, a=6) == []
    assert request.output_token_ids == [5]
    assert request.num_output_placeholders == 0


def test_a_discarded_frame_counts_its_drafts() -> None:
    scheduler = make(AsyncScheduler, num_speculative_tokens=2)
    request = add(scheduler, "a", 3)
    first, second = scheduler.schedule(), scheduler.schedule()
    update(scheduler, first, a=5)
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.async_tokens_to_discard == 3
    third = scheduler.schedule()
    assert third.num_scheduled_tokens == {"a": 4}
    # One token and two rejected drafts: the resumed request keeps its position.
    assert update(scheduler, second, a=6) == []
    assert (request.num_computed_tokens, request.async_tokens_to_discard) == (4, 0)
    outputs = update(scheduler, third, a=6)
    assert outputs[0].new_token_ids == [6]


def test_nothing_of_ended_requests_is_kept() -> None:
    scheduler = make(max_num_seqs=2, num_blocks=9)
    for number in range(20):
        add(scheduler, f"ending {number}", 5, max_tokens=2)
    while scheduler.has_requests():
        output = scheduler.schedule()
        update(scheduler, output, **dict.fromkeys(output.num_scheduled_tokens, 7))
    gc.collect()
    held = [found for found in gc.get_objects() if isinstance(found, Request)]
    assert [request for request in held if request.request_id.startswith("ending")] == []
    assert scheduler.num_free_blocks == 8
