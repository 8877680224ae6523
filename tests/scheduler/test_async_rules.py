"""Steps decided before the tokens of the previous one are known, worked out by hand."""

import pytest

from segattn.scheduler import AsyncScheduler, DraftTokenIds, RequestStatus
from segattn.tests.scheduler.base import add, make, update


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


def test_drafts_take_the_place_of_the_placeholders_of_a_step() -> None:
    scheduler = make(AsyncScheduler, num_speculative_tokens=2)
    for name in "abcd":
        add(scheduler, name, 3)
    scheduler.schedule()
    output = scheduler.schedule()
    given = [[5, 6, 7], [5], [], [8, 9]]
    drafts = DraftTokenIds(["a", "b", "c", "gone"], given)
    scheduler.update_draft_token_ids_in_output(drafts, output)
    # d got none, so it keeps its placeholders and they do not count as invalid.
    assert output.scheduled_spec_decode_tokens == {
        "a": [5, 6],
        "b": [5, -1],
        "c": [-1, -1],
        "d": [-1, -1],
    }
    assert output.num_invalid_spec_tokens == {"b": 1, "c": 2}
    assert given == [[5, 6, 7], [5], [], [8, 9]]
    with pytest.raises(ValueError, match="2 req_ids but 1 draft_token_ids"):
        scheduler.update_draft_token_ids_in_output(DraftTokenIds(["a", "b"], [[1]]), output)
    assert output.scheduled_spec_decode_tokens["a"] == [5, 6]


def test_drafts_for_a_step_without_room_for_them_are_left_out() -> None:
    scheduler = make(AsyncScheduler)
    add(scheduler, "a", 3)
    output = scheduler.schedule()
    scheduler.update_draft_token_ids_in_output(DraftTokenIds(["a"], [[5]]), output)
    assert (output.scheduled_spec_decode_tokens, output.num_invalid_spec_tokens) == ({}, {})


def test_tokens_in_flight_at_a_reset_are_dropped() -> None:
    scheduler = make(AsyncScheduler)
    request = add(scheduler, "a", 3)
    output = scheduler.schedule()
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert (request.num_stale_output_tokens, request.num_output_placeholders) == (3, 0)
    again = scheduler.schedule()
    assert (again.num_scheduled_tokens, again.preempted_req_ids) == ({"a": 3}, {"a"})
    assert update(scheduler, output, a=5) == []
    assert (request.num_in_flight_tokens, request.num_stale_output_tokens) == (3, 0)
    assert update(scheduler, again, a=6)[0].new_token_ids == [6]


def test_a_preempted_request_waits_for_its_token_in_flight() -> None:
    # Four blocks of 4: "a" grows into the block of "b", whose token is in flight and still comes.
    scheduler = make(AsyncScheduler, num_blocks=5, enable_prefix_caching=False)
    add(scheduler, "a", 8, max_tokens=2)
    b = add(scheduler, "b", 7)
    first = scheduler.schedule()
    assert first.num_scheduled_tokens == {"a": 8, "b": 7}
    second = scheduler.schedule()
    assert (second.num_scheduled_tokens, second.preempted_req_ids) == ({"a": 1}, {"b"})
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert scheduler.schedule().num_scheduled_tokens == {}
    assert (b.num_stale_output_tokens, b.drop_stale_output) == (7, False)
    assert update(scheduler, first, b=5)[0].new_token_ids == [5]
    assert scheduler.schedule().num_scheduled_tokens == {"b": 8}


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


def test_frames_from_before_two_resets_are_dropped() -> None:
    # A prompt in chunks of 3 tokens; "b" is there, since a lone request has no threshold.
    scheduler = make(AsyncScheduler, max_num_batched_tokens=4, long_prefill_token_threshold=3)
    request = add(scheduler, "a", 3, max_tokens=2)
    first, second = scheduler.schedule(), scheduler.schedule()
    update(scheduler, first, a=5)
    add(scheduler, "b", 3)
    scheduler.reset_prefix_cache(reset_running_requests=True)
    third = scheduler.schedule()
    assert third.num_scheduled_tokens == {"a": 3, "b": 1}
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert update(scheduler, second, a=6) == []
    assert update(scheduler, third) == []
    assert (request.output_token_ids, request.num_output_placeholders) == ([5], 0)


def test_a_dropped_frame_counts_its_drafts() -> None:
    scheduler = make(AsyncScheduler, num_speculative_tokens=2)
    request = add(scheduler, "a", 3)
    first, second = scheduler.schedule(), scheduler.schedule()
    update(scheduler, first, a=5)
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.num_stale_output_tokens == 3
    third = scheduler.schedule()
    assert third.num_scheduled_tokens == {"a": 4}
    # One token and two rejected drafts: the resumed request keeps its position.
    assert update(scheduler, second, a=6) == []
    assert (request.num_computed_tokens, request.num_stale_output_tokens) == (4, 0)
    assert update(scheduler, third, a=6)[0].new_token_ids == [6]
