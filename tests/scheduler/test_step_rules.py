"""Which requests a step schedules and how many tokens they get, worked out by hand."""

from segattn.scheduler import Admission, DraftTokenIds, PauseState, RequestStatus
from segattn.tests.scheduler.base import add, make, names, update


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
    add(scheduler, "b", 1)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 6, "b": 1}
    assert scheduler.schedule().num_scheduled_tokens == {"a": 4}


def test_the_prompt_of_a_lone_request_is_not_cut() -> None:
    scheduler = make(long_prefill_token_threshold=6)
    add(scheduler, "a", 10)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 10}


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


def test_drafts_of_a_request_that_is_preempted_in_its_step_are_not_sent() -> None:
    scheduler = make(
        policy="priority", num_blocks=5, enable_prefix_caching=False, num_speculative_tokens=1
    )
    add(scheduler, "a", 6, priority=1)
    b = add(scheduler, "b", 8, priority=0)
    update(scheduler, scheduler.schedule(), a=1, b=2)
    scheduler.running.reverse()
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[5]]))
    # "a" gets 2 tokens in its blocks, then "b" needs a block of "a".
    output = scheduler.schedule()
    assert (output.num_scheduled_tokens, output.preempted_req_ids) == ({"b": 1}, {"a"})
    assert output.scheduled_spec_decode_tokens == {}
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


def test_pausing_admissions_lets_running_requests_go_on() -> None:
    scheduler = make()
    add(scheduler, "a", 3)
    update(scheduler, scheduler.schedule(), a=1)
    add(scheduler, "b", 3)
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert scheduler.get_num_unfinished_requests() == 1
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 1}
    assert scheduler.waiting_reasons() == {"b": Admission.PAUSED}
    update(scheduler, output, a=2)
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert scheduler.get_num_unfinished_requests() == 0
    assert not scheduler.has_requests()
    assert scheduler.schedule().num_scheduled_tokens == {}
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduler.get_num_unfinished_requests() == 2
