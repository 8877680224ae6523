"""Steps that are taken back, and calls that were interrupted.

Nothing is logged for it: a step knows what it decided, and what a scheduler counts beside that is
derived anew from block tables, token lists and the steps in flight. That takes time in the number
of blocks and requests, once per failure.
"""

from typing import TYPE_CHECKING

from .request import Request, RequestStatus
from .step import Step

if TYPE_CHECKING:
    from .scheduler import Scheduler


def take_back(scheduler: "Scheduler", step: Step, running: list[Request]) -> None:
    """Undo a step that failed in execution or, wherever it was, while it was being decided.

    `running` is the list from before the step, or the present one. Requests that it preempted wait.
    """
    was_in_flight = step in scheduler.steps_in_flight
    if was_in_flight:
        scheduler.steps_in_flight.remove(step)
        scheduler.num_executed_steps -= 1
    if step.output is not None:
        scheduler.finished_req_ids |= step.output.finished_req_ids
        scheduler.preempted_req_ids |= step.output.preempted_req_ids
    scheduler.kv_cache_manager.block_pool.forget(step.newly_cached)
    computed_before = _computed_before(step, was_in_flight)
    for request in step.running:
        if scheduler.requests.get(request.request_id) is request:
            _recount(scheduler, request)
            if request.status is RequestStatus.RUNNING:
                _take_back_running(scheduler, step, request, computed_before)
    if step.output is None:
        for victim in step.preempted:
            _wait(scheduler, victim, RequestStatus.PREEMPTED)
    waits = {*step.admitted, *(step.preempted if step.output is None else ())}
    scheduler.running = [request for request in running if request not in waits]
    for request in reversed(step.admitted):
        if scheduler.requests.get(request.request_id) is request:
            is_resumed = request.request_id in step.resumed_req_ids
            status = RequestStatus.PREEMPTED if is_resumed else RequestStatus.WAITING
            _wait(scheduler, request, status)
    for request in reversed(step.passed_over):
        is_live = scheduler.requests.get(request.request_id) is request
        if is_live and not was_in_flight and request not in scheduler.waiting:
            scheduler.waiting.prepend_request(request)
    scheduler.previously_scheduled = set()
    scheduler.kv_cache_manager.rebuild(scheduler.requests.values())


def settle(scheduler: "Scheduler") -> None:
    """Carry to its end what an interrupted call began to finish or to preempt."""
    for request in [*scheduler.requests.values()]:
        if request.is_finished():
            _drop(scheduler, request)
        elif request.status is not RequestStatus.WAITING and request not in scheduler.running:
            scheduler.preempted_req_ids.add(request.request_id)
            _wait(scheduler, request, RequestStatus.PREEMPTED)
    scheduler.running = [
        request for request in scheduler.running if request.status is RequestStatus.RUNNING
    ]
    scheduler.kv_cache_manager.rebuild(scheduler.requests.values())


def _computed_before(step: Step, was_in_flight: bool) -> dict[str, int]:
    """Computed tokens without the step, of its requests that were running before it."""
    if was_in_flight or step.output is None:
        num_tokens = step.num_scheduled_tokens if was_in_flight else {}
        return {
            request.request_id: request.num_computed_tokens - num_tokens.get(request.request_id, 0)
            for request in step.running
        }
    cached = step.output.scheduled_cached_reqs
    return dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def _take_back_running(
    scheduler: "Scheduler", step: Step, request: Request, computed_before: dict[str, int]
) -> None:
    request_id = request.request_id
    request.num_computed_tokens = computed_before[request_id]
    request.is_prefill_chunk = request_id in step.chunks_before
    request.spec_token_ids = step.spec_token_ids.get(request_id, [])
    scheduler.told_anew.add(request_id)
    num_new_blocks = len(step.new_block_ids.get(request_id, ()))
    if num_new_blocks:
        del request.block_ids[-num_new_blocks:]


def _wait(scheduler: "Scheduler", request: Request, status: RequestStatus) -> None:
    """Let a request wait that owns nothing. What is in flight of it was scheduled before."""
    request.drop_stale_output = request.drop_stale_output and request.num_stale_output_tokens > 0
    request.status = status
    request.block_ids, request.spec_token_ids = [], []
    request.num_computed_tokens = request.num_cached_blocks = request.blocks_due_at = 0
    request.is_prefill_chunk = False
    _recount(scheduler, request)
    request.num_stale_output_tokens = request.num_in_flight_tokens
    request.num_output_placeholders = 0
    if request not in scheduler.waiting:
        scheduler.waiting.prepend_request(request)


def _recount(scheduler: "Scheduler", request: Request) -> None:
    """Count the request's tokens in flight anew; the oldest of them are the stale ones."""
    num_stale, reached, placeholders = request.num_stale_output_tokens, 0, 0
    for step in scheduler.steps_in_flight:
        request_id = request.request_id
        if request in step.requests:
            reached += step.num_scheduled_tokens[request_id]
            if reached > num_stale and request_id not in step.unsampled:
                placeholders += 1 + len(step.spec_token_ids.get(request_id, ()))
    request.num_in_flight_tokens = reached
    request.num_stale_output_tokens = min(num_stale, reached)
    request.num_output_placeholders = placeholders if scheduler.is_async else 0


def _drop(scheduler: "Scheduler", request: Request) -> None:
    request.block_ids = []
    scheduler.finished_req_ids.add(request.request_id)
    scheduler.deferred.discard(request.request_id)
    if request in scheduler.waiting:
        scheduler.waiting.remove_requests([request])
    del scheduler.requests[request.request_id]
