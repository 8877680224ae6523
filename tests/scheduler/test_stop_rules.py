"""When requests end, and what drafts add to that, worked out by hand."""

from typing import Any

import pytest

from segattn.scheduler import DraftTokenIds, RequestStatus
from segattn.tests.scheduler.base import add, make, update


@pytest.mark.parametrize(
    ("more", "tokens", "reason", "stop_reason"),
    [
        ({"max_tokens": 2}, [5, 6], "length", None),
        ({"eos_token_id": 9}, [5, 9], "stop", None),
        ({"stop_token_ids": [8, 7]}, [5, 7], "stop", 7),
        ({"eos_token_id": 9, "stop_token_ids": [9]}, [9], "stop", None),
        # A sampler masks these tokens until min_tokens are out; what it lets through ends.
        ({"eos_token_id": 9, "min_tokens": 2}, [9], "stop", None),
        ({"max_tokens": 1, "min_tokens": 3}, [5], "length", None),
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


def test_a_preempted_request_loses_its_drafts() -> None:
    scheduler = make(num_speculative_tokens=2)
    add(scheduler, "a", 3)
    update(scheduler, scheduler.schedule(), a=1)
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[2, 3]]))
    scheduler.reset_prefix_cache(reset_running_requests=True)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 4}
    update(scheduler, output, a=2)
    output = scheduler.schedule()
    assert (output.num_scheduled_tokens, output.scheduled_spec_decode_tokens) == ({"a": 1}, {})


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


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (RequestStatus.WAITING, None),
        (RequestStatus.RUNNING, None),
        (RequestStatus.PREEMPTED, None),
        (RequestStatus.FINISHED_STOPPED, "stop"),
        (RequestStatus.FINISHED_LENGTH_CAPPED, "length"),
        (RequestStatus.FINISHED_ABORTED, "abort"),
        (RequestStatus.FINISHED_IGNORED, "length"),
        (RequestStatus.FINISHED_ERROR, "error"),
    ],
)
def test_every_finished_status_has_a_reason_for_the_client(
    status: RequestStatus, reason: str | None
) -> None:
    assert status.finish_reason == reason
    assert status.is_finished == (reason is not None)
