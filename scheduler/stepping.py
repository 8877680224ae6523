"""The decisions of a step: running requests first, then waiting ones."""

from typing import TYPE_CHECKING

from .admission import Admission
from .config import PauseState
from .output import SchedulerOutput
from .request import Request, RequestStatus
from .request_queue import RequestQueue
from .step import Step, advance

if TYPE_CHECKING:
    from .scheduler import Scheduler


def decide(scheduler: "Scheduler", step: Step, throttle_prefills: bool) -> SchedulerOutput:
    """Make all decisions of a step; its tokens count as computed then."""
    config, paused = scheduler.config, scheduler._pause_state
    if config.long_prefill_token_threshold > 0:
        step.threshold = _long_prefill_threshold(scheduler)
    if throttle_prefills or config.prefill_schedule_interval > 1:
        step.defer_prefills = defers_prefills(scheduler, throttle_prefills) and any(
            not request.is_prefill_chunk for request in scheduler.all_running()
        )
    # 1. Running requests, in the order of their admission.
    schedule_running(scheduler, step)
    # 2. Waiting requests, unless memory is short already.
    if step.preempted:
        step.admission_stop = Admission.PREEMPTION
    elif paused is not PauseState.UNPAUSED:
        step.admission_stop = Admission.PAUSED
    elif len(scheduler.requests) > len(scheduler.running):
        schedule_waiting(scheduler, step)
    elif not step.defer_prefills:
        scheduler.prefill_capacity_bound = False
    # 3. The output, with the counts from before the step.
    step.output = output = step.make_output(
        scheduler.previously_scheduled,
        scheduler.told_anew,
        scheduler.finished_req_ids,
        scheduler.preempted_req_ids,
    )
    num_scheduled = len(step.num_scheduled_tokens)
    output.num_spec_tokens_to_schedule = (
        config.num_drafts_for(num_scheduled)
        if num_scheduled and config.num_speculative_tokens_per_batch_size
        else scheduler.num_spec_tokens
    )
    output.skip_drafts = (
        config.can_skip_drafts and config.num_lookahead_tokens > 0 and not step.needs_drafts
    )
    # 4. The scheduled tokens count as computed from here on.
    advance(scheduler, step, output.num_spec_tokens_to_schedule)
    return output


def note(scheduler: "Scheduler", step: Step) -> None:
    """Keep what the next step must know of this one. Nothing here can fail."""
    scheduler.previously_scheduled = set(step.num_scheduled_tokens)
    if scheduler.told_anew:
        scheduler.told_anew = scheduler.told_anew - scheduler.previously_scheduled
    scheduler.finished_req_ids, scheduler.preempted_req_ids = set(), set()
    scheduler.admission_stop = step.admission_stop
    if num_waiting := len(scheduler.waiting):
        scheduler.admission_counts[step.admission_stop] += 1
        scheduler.admission_counts[Admission.BEHIND] += num_waiting - 1
    if step.num_scheduled_tokens:
        scheduler.num_executed_steps += 1
        scheduler.steps_in_flight.append(step)


def defers_prefills(scheduler: "Scheduler", throttle_prefills: bool) -> bool:
    """Whether prefills are put off while something decodes."""
    if scheduler.prefill_capacity_bound:
        return False
    interval = scheduler.config.prefill_schedule_interval
    steps_since = scheduler.num_executed_steps + 1 - scheduler.last_prefill_step
    return throttle_prefills or (interval > 1 and steps_since < interval)


def _long_prefill_threshold(scheduler: "Scheduler") -> int:
    """Most tokens of one request in this step, 0 for no limit: a lone request has none."""
    config = scheduler.config
    threshold = config.long_prefill_token_threshold
    num_requests = sum(scheduler.get_request_counts())
    if num_requests <= 1:
        return 0
    if config.long_prefill_token_threshold_adaptive:
        return max(threshold, config.max_num_batched_tokens // num_requests)
    return threshold


def schedule_running(scheduler: "Scheduler", step: Step) -> None:
    """Give running requests their tokens in list order, as far as the budget goes."""
    running, room, defer_prefills = scheduler.running, step.room, step.defer_prefills
    threshold, draft_slots = step.threshold, step.draft_slots
    has_limits = threshold > 0 or draft_slots > 0
    can_skip_drafts = scheduler.config.can_skip_drafts
    # One position of the model stays for the token that will be sampled.
    last_position = scheduler.max_model_len - 1
    scheduled, num_scheduled_tokens = step.running, step.num_scheduled_tokens
    index = 0
    while room > 0 and index < len(running):
        request = running[index]
        index += 1
        num_computed = request.num_computed_tokens
        num_placeholders = request.num_output_placeholders
        if (
            num_placeholders
            and num_computed + 2 - num_placeholders
            >= request.num_prompt_tokens + request.max_tokens
        ):
            continue  # the step in flight is certain to finish it
        is_chunk = request.is_prefill_chunk
        if defer_prefills and is_chunk:
            continue
        num_new = request.num_tokens + len(request.spec_token_ids) + num_placeholders - num_computed
        if has_limits and 0 < threshold < num_new:
            num_new = threshold
        # Comparisons: a call of min() would be the slowest part of the loop.
        if num_new > room:
            num_new = room
        if num_new > last_position - num_computed:
            num_new = last_position - num_computed
        if num_new <= 0:
            continue
        if num_computed + num_new >= request.blocks_due_at:
            passed_by = _allocate_or_preempt(scheduler, step, request, num_computed + num_new)
            index -= passed_by
            if request.status is not RequestStatus.RUNNING:
                room = step.room
                continue
        scheduled.append(request)
        num_scheduled_tokens[request.request_id] = num_new
        step.token_budget -= num_new
        step.input_budget -= num_new + draft_slots
        room = step.room if draft_slots else step.token_budget
        if is_chunk:
            step.has_prefill = True
            step.chunks_before.add(request.request_id)
        if can_skip_drafts:
            note_drafts_needed(step, request, num_computed + num_new)
        if request.spec_token_ids:
            _schedule_drafts(step, request, num_new)


def _allocate_or_preempt(
    scheduler: "Scheduler", step: Step, request: Request, num_tokens: int
) -> int:
    """Give a running request its blocks, preempting others until they fit, or itself.

    Returns by how many places the list before the next request became shorter.
    """
    running, num_before = scheduler.running, 0
    while True:
        new_blocks = scheduler.kv_cache_manager.allocate_slots(request, num_tokens)
        if new_blocks is not None:
            if new_blocks:
                step.new_block_ids[request.request_id] = new_blocks
            return num_before
        if scheduler.config.policy == "priority":
            # The first of the least important ones: the least important came last.
            victim = max(running, key=lambda request: (request.priority, request.arrival_time))
        else:
            victim = running[-1]
        step.preempted.append(victim)
        if scheduler.repairs_vllm_faults:
            # What it should have computed in this step nobody will.
            scheduler.kv_cache_manager.uncache(victim)
        num_before += running.index(victim) <= running.index(request)
        step.unschedule(victim)
        running.remove(victim)
        scheduler.preempt(victim, drop_stale_output=scheduler.config.requires_kv_delivery)
        if victim is request:
            return num_before


def _schedule_drafts(step: Step, request: Request, num_new: int) -> None:
    """Note the drafts among the scheduled tokens; drafts serve for one step only."""
    num_known = request.num_tokens + request.num_output_placeholders
    num_drafts = num_new + request.num_computed_tokens - num_known
    if num_drafts > 0:
        step.spec_token_ids[request.request_id] = request.spec_token_ids[:num_drafts]
    request.spec_token_ids = []


def note_drafts_needed(step: Step, request: Request, num_computed: int) -> None:
    """Drafts after the step serve a request that samples now and again later."""
    num_outputs = request.num_output_tokens + 1 + (request.num_output_placeholders > 0)
    if num_computed >= request.num_tokens and num_outputs < request.max_tokens:
        step.needs_drafts = True


def schedule_waiting(scheduler: "Scheduler", step: Step) -> None:
    """Admit waiting requests in their order until one of them must wait."""
    queue = scheduler.waiting
    stop = Admission.ADMITTED
    while queue and stop is Admission.ADMITTED:
        request = queue.peek_request()
        if request.num_stale_output_tokens > 0 and not request.drop_stale_output:
            # What it will have sampled is still in flight.
            step.passed_over.append(request)
            scheduler.deferred.add(request.request_id)
            queue.pop_request()
            continue
        stop = _admit(scheduler, step, queue)
    for request in reversed(step.passed_over):
        queue.prepend_request(request)
    step.admission_stop = stop if stop is not Admission.ADMITTED or not queue else Admission.BLOCKED
    if not step.defer_prefills:
        num_waiting = scheduler.get_request_counts()[1]
        scheduler.prefill_capacity_bound = num_waiting > len(scheduler.deferred)


def _admit(scheduler: "Scheduler", step: Step, queue: RequestQueue) -> Admission:
    """Start the request whose turn it is, or say why it must wait."""
    room, config, manager = step.room, scheduler.config, scheduler.kv_cache_manager
    if room <= 0:
        return Admission.TOKEN_BUDGET
    if len(scheduler.running) >= scheduler.max_num_active_reqs:
        return Admission.MAX_NUM_SEQS
    request = queue.peek_request()
    hit_blocks = manager.get_computed_blocks(request)
    num_computed = len(hit_blocks) * scheduler.block_size
    if step.defer_prefills and num_computed < request.num_tokens - 1:
        return Admission.THROTTLED
    # All known tokens, not the prompt alone: a resumed request computes its outputs again.
    num_new = request.num_tokens - num_computed
    num_drafts = _num_padding_drafts(scheduler, step, num_new, num_computed)
    if num_drafts and 1 + num_drafts > room:
        return Admission.TOKEN_BUDGET
    num_new += num_drafts
    if 0 < step.threshold < num_new:
        num_new = step.threshold
    if num_new > room:
        if not config.enable_chunked_prefill:
            return Admission.TOKEN_BUDGET
        num_new = room
    num_running = scheduler.get_request_counts()[0]
    # Noted before anything changes, for an interrupted step to be taken back.
    if request.status is RequestStatus.PREEMPTED:
        step.resumed_req_ids.add(request.request_id)
    step.admitted.append(request)
    if not manager.admit(
        request,
        num_new,
        hit_blocks,
        full_sequence_must_fit=config.scheduler_reserve_full_isl,
        keep_watermark=num_running > 0,
    ):
        step.admitted.pop()
        step.resumed_req_ids.discard(request.request_id)
        return Admission.KV_BLOCKS
    queue.pop_request()
    scheduler.running.append(request)
    scheduler.deferred.discard(request.request_id)
    step.new_block_ids[request.request_id] = request.block_ids.copy()
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = num_computed
    step.take(request, num_new)
    if num_drafts:
        step.spec_token_ids[request.request_id] = [-1] * num_drafts
    if num_computed < request.num_tokens - 1:
        step.has_prefill = True
    if config.can_skip_drafts:
        note_drafts_needed(step, request, num_computed + num_new)
    return Admission.ADMITTED


def _num_padding_drafts(scheduler: "Scheduler", step: Step, num_new: int, num_computed: int) -> int:
    """Drafts that make a request with one token to compute as long as the decodes beside it."""
    num_drafts = scheduler.num_spec_tokens
    if (
        num_new != 1
        or not num_drafts
        or not scheduler.pads_new_decodes
        or scheduler.config.num_speculative_tokens_per_batch_size
        or step.chunks_before
        or not (step.running or num_computed)
        or num_computed + num_drafts + 2 > scheduler.max_model_len
    ):
        return 0
    return num_drafts
