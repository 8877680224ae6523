"""Which blocks requests get, share and give back, worked out by hand.

Blocks are numbered from 1 (0 is the null block) and taken in that order; a block holds 4 tokens.
"""

import gc

import pytest

from segattn.scheduler import AsyncScheduler, Request, RequestStatus, Scheduler
from segattn.tests.scheduler.base import add, make, names, update


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


@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_a_prompt_beyond_the_length_of_the_model_has_blocks_for_that_length(
    kind: type[Scheduler],
) -> None:
    scheduler = make(kind, max_model_len=8, block_size=2)
    requests = [add(scheduler, name, [5] * 13) for name in "ab"]
    output = scheduler.schedule()
    scheduler.check_integrity()
    assert [len(request.block_ids) for request in requests] == [4, 4]
    update(scheduler, output, a=7, b=7)
    assert not scheduler.requests


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


def test_prefix_caching_off_hits_nothing() -> None:
    scheduler = make(enable_prefix_caching=False)
    for name in "ab":
        add(scheduler, name, list(range(9)))
    output = scheduler.schedule()
    assert [new.num_computed_tokens for new in output.scheduled_new_reqs] == [0, 0]


def test_freed_blocks_queue_by_content_and_from_the_end_of_the_request() -> None:
    scheduler = make(num_blocks=8)
    add(scheduler, "a", 10)
    add(scheduler, "b", 10)
    update(scheduler, scheduler.schedule(), a=1, b=1)
    scheduler.finish_requests(["a", "b"], RequestStatus.FINISHED_ABORTED)
    # Block 7 was never used. Blocks 3 and 6 hold two tokens each: no content to find, so they go to
    # the front, the latest freed first. Full blocks go to the back, the last one of a request
    # before the others.
    assert list(scheduler.kv_cache_manager.block_pool.free) == [6, 3, 7, 2, 1, 5, 4]


def test_without_prefix_caching_the_block_freed_last_is_taken_first() -> None:
    scheduler = make(num_blocks=8, enable_prefix_caching=False)
    add(scheduler, "a", 10)
    update(scheduler, scheduler.schedule(), a=1)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert list(scheduler.kv_cache_manager.block_pool.free) == [3, 2, 1, 4, 5, 6, 7]


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
