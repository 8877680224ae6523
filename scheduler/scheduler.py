"""vLLM V1's scheduler for one full-attention KV cache group."""

from .admission import Admission
from .config import SchedulerConfig
from .integrity import check_integrity
from .output import SchedulerOutput, StepKind
from .pause_state import PauseState
from .request import Request, RequestStatus
from .request_pool import InFlight
from .request_queue import RequestQueue
from .step import Step
from .step_update import StepUpdate


class Scheduler(StepUpdate):
    """Decides who computes how many tokens in each step, and in which blocks.

    Every decision equals vLLM 0.24's. `schedule` and `update_from_output` alternate; a step counts
    as computed when it is scheduled. A call that raises leaves every queue and block as before.
    """

    is_async = False

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.admission_stop = Admission.ADMITTED
        """Why the latest step admitted no further request."""
        self.admission_counts = dict.fromkeys(Admission, 0)
        """Waiting requests by reason, summed over the steps."""
        self._prefill_capacity_bound = False

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Decide the next step.

        `throttle_prefills` puts prefills off while something decodes, as data-parallel serving asks
        for, unless the latest admissions ended with requests still waiting.
        """
        with self._transaction:
            self._record_step()
            paused_all = self._pause_state is PauseState.PAUSED_ALL
            step = Step(0 if paused_all else self.config.step_token_budget)
            step.defer_prefills = throttle_prefills and self._can_defer_prefills()
            # 1. Running requests, in the order of their admission.
            self._schedule_running(step)
            # 2. Waiting requests, unless memory is short already.
            if step.preempted:
                step.admission_stop = Admission.PREEMPTION
            elif self._pause_state is not PauseState.UNPAUSED:
                step.admission_stop = Admission.PAUSED
            else:
                self._schedule_waiting(step)
            # 3. The output, with the counts from before the step.
            output = self._make_output(step)
            # 4. The scheduled tokens count as computed from here on.
            self._advance(step)
            self._note_step(step)
            self._note_in_flight(step, output)
            return output

    def step_failed(self, scheduler_output: SchedulerOutput, error: BaseException) -> None:
        """Take back the newest step in flight, whose execution failed with `error`.

        Its requests have computed what they had before, those it admitted wait again, its blocks
        are free and nobody finds what it should have filled. Requests that it preempted wait. The
        next step tells the runner again what this one told: finished and preempted ids, and whole
        block tables, as of resumed requests. ValueError, nothing changed, for another step.
        """
        if not self._in_flight or self._in_flight[-1].output is not scheduler_output:
            raise ValueError("scheduler_output: must be the newest step in flight") from error
        failed = self._in_flight.pop()
        manager = self.kv_cache_manager
        if manager.prefix_cache is not None:
            manager.prefix_cache.forget(failed.newly_cached)
        for request in reversed(failed.requests):
            if self.requests.get(request.request_id) is request:
                self._take_back(request, failed)
        self.finished_req_ids |= scheduler_output.finished_req_ids
        self._preempted_before |= scheduler_output.preempted_req_ids
        self._previously_scheduled = set()

    def _take_back(self, request: Request, failed: InFlight) -> None:
        output, request_id = failed.output, request.request_id
        is_new = any(new.req_id == request_id for new in output.scheduled_new_reqs)
        is_admitted = is_new or request_id in failed.resumed
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens -= output.num_scheduled_tokens[request_id]
            request.num_output_placeholders -= failed.num_placeholders.get(request_id, 0)
            if is_admitted:
                self.kv_cache_manager.free(request)
                request.num_computed_tokens = 0
                request.spec_token_ids = []
                request.status = RequestStatus.PREEMPTED
                self.running.remove(request)
                self.waiting.prepend_request(request)
            else:
                self._told_anew.add(request_id)
                self.kv_cache_manager.truncate(
                    request, len(request.block_ids) - _num_new_blocks(output, request_id)
                )
                known = request.num_tokens + request.num_output_placeholders
                request.is_prefill_chunk = request.num_computed_tokens < known - 1
        if is_new:
            request.status = RequestStatus.WAITING

    def _note_in_flight(self, step: Step, output: SchedulerOutput) -> None:
        requests = step.running + step.admitted
        placeholders = {
            request.request_id: 1 + len(step.spec_token_ids.get(request.request_id, ()))
            for request in requests
            if self.is_async and not request.is_prefill_chunk
        }
        manager = self.kv_cache_manager
        cached, manager.newly_cached = manager.newly_cached, []
        self._preempted_before, self._told_anew = set(), set()
        newest = InFlight(output, requests, step.resumed_req_ids.copy(), cached, placeholders)
        self._in_flight = [*self._in_flight, newest]

    def waiting_reasons(self) -> dict[str, Admission]:
        """For each waiting request, in queue order, why the latest step did not admit it."""
        names = [request.request_id for request in self.waiting]
        if self.admission_stop is Admission.ADMITTED:
            # That step left nobody waiting: they came since.
            return dict.fromkeys(names, Admission.NOT_SCHEDULED)
        reasons = dict.fromkeys(names, Admission.BEHIND)
        return reasons | dict.fromkeys(names[:1], self.admission_stop)

    def check_integrity(self) -> None:
        """Raise IntegrityError naming a broken invariant of queues, requests, blocks or cache."""
        check_integrity(self)

    def _schedule_running(self, step: Step) -> None:
        running, budget, defer_prefills = self.running, step.token_budget, step.defer_prefills
        threshold = self.config.long_prefill_token_threshold
        # One position of the model stays for the token that will be sampled.
        last_position = self.max_model_len - 1
        scheduled, num_scheduled_tokens = step.running, step.num_scheduled_tokens
        index = 0
        while budget > 0 and index < len(running):
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
            if defer_prefills and request.is_prefill_chunk:
                continue
            num_new = (
                request.num_tokens + len(request.spec_token_ids) + num_placeholders - num_computed
            )
            if 0 < threshold < num_new:
                num_new = threshold
            # Comparisons: a call of min() would be the slowest part of the loop.
            if num_new > budget:
                num_new = budget
            if num_new > last_position - num_computed:
                num_new = last_position - num_computed
            if num_new <= 0:
                continue
            if num_computed + num_new >= request.blocks_due_at:
                step.token_budget = budget
                num_unscheduled = self._allocate_or_preempt(step, request, num_computed + num_new)
                if num_unscheduled is None:
                    return
                index -= num_unscheduled
                budget = step.token_budget
            scheduled.append(request)
            num_scheduled_tokens[request.request_id] = num_new
            budget -= num_new
            if request.spec_token_ids:
                self._schedule_drafts(step, request, num_new)
        step.token_budget = budget

    def _allocate_or_preempt(self, step: Step, request: Request, num_tokens: int) -> int | None:
        """Give a running request its blocks, preempting others until they fit.

        Returns how many requests lost the tokens that this step had given them; None when the
        request itself had to go, which ends the running part of the step.
        """
        num_unscheduled = 0
        while True:
            new_blocks = self.kv_cache_manager.allocate_slots(request, num_tokens)
            if new_blocks is not None:
                if new_blocks:
                    step.new_block_ids[request.request_id] = new_blocks
                return num_unscheduled
            victim = self._pop_victim()
            num_unscheduled += step.unschedule(victim)
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return None

    def _pop_victim(self) -> Request:
        if self.policy == "priority":
            # The first of the least important ones: the least important came last.
            victim = max(self.running, key=lambda request: (request.priority, request.arrival_time))
            self.running.remove(victim)
            return victim
        return self.running.pop()

    def _schedule_drafts(self, step: Step, request: Request, num_new: int) -> None:
        """Note the drafts among the scheduled tokens; drafts serve for one step only."""
        num_drafts = (
            num_new
            + request.num_computed_tokens
            - request.num_tokens
            - request.num_output_placeholders
        )
        if num_drafts > 0:
            step.spec_token_ids[request.request_id] = request.spec_token_ids[:num_drafts]
        self._transaction.record((setattr, request, "spec_token_ids", request.spec_token_ids))
        request.spec_token_ids = []

    def _schedule_waiting(self, step: Step) -> None:
        """Admit waiting requests in their order until one of them must wait."""
        queue = self.waiting
        stop = Admission.ADMITTED
        while queue and stop is Admission.ADMITTED:
            stop = self._admit(step, queue)
        step.admission_stop = stop
        if not step.defer_prefills:
            self._prefill_capacity_bound = bool(queue)

    def _admit(self, step: Step, queue: RequestQueue) -> Admission:
        """Start the request whose turn it is, or say why it must wait."""
        if step.token_budget == 0:
            return Admission.TOKEN_BUDGET
        if len(self.running) >= self.max_num_running_reqs:
            return Admission.MAX_NUM_SEQS
        if step.defer_prefills:
            return Admission.THROTTLED
        request = queue.peek_request()
        hit_blocks = self.kv_cache_manager.get_computed_blocks(request)
        # All known tokens, not the prompt alone: a resumed request computes its outputs again.
        num_new = request.num_tokens - len(hit_blocks) * self.block_size
        threshold = self.config.long_prefill_token_threshold
        if 0 < threshold < num_new:
            num_new = threshold
        if num_new > step.token_budget:
            if not self.config.enable_chunked_prefill:
                return Admission.TOKEN_BUDGET
            num_new = step.token_budget
        if not self.kv_cache_manager.admit(
            request,
            num_new,
            hit_blocks,
            full_sequence_must_fit=self.config.scheduler_reserve_full_isl,
            keep_watermark=bool(self.running),
        ):
            return Admission.KV_BLOCKS
        self._start(step, queue, len(hit_blocks) * self.block_size)
        step.num_scheduled_tokens[request.request_id] = num_new
        step.token_budget -= num_new
        return Admission.ADMITTED

    def _start(self, step: Step, queue: RequestQueue, num_hit_tokens: int) -> None:
        """Move the request whose turn it is to the running ones."""
        request = queue.peek_request()
        self._record_request(request)
        self._transaction.record((_put_back, queue, request))
        queue.pop_request()
        self.running.append(request)
        step.admitted.append(request)
        step.new_block_ids[request.request_id] = request.block_ids.copy()
        if request.status is RequestStatus.PREEMPTED:
            step.resumed_req_ids.add(request.request_id)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit_tokens

    def _make_output(self, step: Step) -> SchedulerOutput:
        num_common_prefix_blocks = (
            self.kv_cache_manager.get_num_common_prefix_blocks(self.running[0])
            if self.running
            else 0
        )
        output = step.make_output(
            self._previously_scheduled,
            num_common_prefix_blocks,
            self.finished_req_ids,
            self.num_spec_tokens,
        )
        output.step_kind = self._step_kind(step)
        output.preempted_req_ids |= self._preempted_before
        cached = output.scheduled_cached_reqs
        for place, request_id in enumerate(cached.req_ids):
            if request_id in self._told_anew:
                cached.resumed_req_ids.add(request_id)
                cached.new_block_ids[place] = (self.requests[request_id].block_ids.copy(),)
        return output

    def _step_kind(self, step: Step) -> StepKind:
        prefills = [
            request.num_computed_tokens < request.num_tokens - (request.num_output_tokens > 0)
            for request in step.running + step.admitted
        ]
        if not prefills:
            return "empty"
        if all(prefills):
            return "prefill"
        return "mixed" if any(prefills) else "decode"

    def _advance(self, step: Step) -> None:
        """Count the scheduled tokens as computed."""
        requests = step.running + step.admitted if step.admitted else step.running
        advanced: list[tuple[Request, int, bool]] = []
        self._transaction.record((_undo_advance, advanced))
        for request, num_new in zip(requests, step.num_scheduled_tokens.values(), strict=True):
            num_computed = request.num_computed_tokens
            advanced.append((request, num_computed, request.is_prefill_chunk))
            request.num_computed_tokens = num_computed = num_computed + num_new
            request.is_prefill_chunk = (
                num_computed < request.num_tokens + request.num_output_placeholders
            )

    def _record_step(self) -> None:
        manager = self.kv_cache_manager
        self._transaction.record((setattr, manager, "newly_cached", manager.newly_cached))
        for name in ("_in_flight", "_preempted_before", "_told_anew"):
            self._transaction.record((setattr, self, name, getattr(self, name)))
        manager.newly_cached = []
        self._transaction.record(
            (
                self._restore_step,
                self.running,
                self.running.copy(),
                self.finished_req_ids,
                self._previously_scheduled,
                self._prefill_capacity_bound,
                self.admission_stop,
                self.admission_counts.copy(),
            )
        )

    def _restore_step(
        self,
        running: list[Request],
        requests: list[Request],
        finished_req_ids: set[str],
        previously_scheduled: set[str],
        prefill_capacity_bound: bool,
        admission_stop: Admission,
        admission_counts: dict[Admission, int],
    ) -> None:
        self._restore_running(running, requests)
        self.finished_req_ids = finished_req_ids
        self._previously_scheduled = previously_scheduled
        self._prefill_capacity_bound = prefill_capacity_bound
        self.admission_stop = admission_stop
        self.admission_counts = admission_counts

    def _note_step(self, step: Step) -> None:
        """Keep what the next step must know of this one."""
        self._previously_scheduled = set(step.num_scheduled_tokens)
        self.finished_req_ids = set()
        self.admission_stop = step.admission_stop
        if num_waiting := len(self.waiting):
            self.admission_counts[step.admission_stop] += 1
            self.admission_counts[Admission.BEHIND] += num_waiting - 1

    def _can_defer_prefills(self) -> bool:
        return not self._prefill_capacity_bound and any(
            not request.is_prefill_chunk for request in self.running
        )


def _undo_advance(advanced: list[tuple[Request, int, bool]]) -> None:
    for request, num_computed_tokens, is_prefill_chunk in advanced:
        request.num_computed_tokens = num_computed_tokens
        request.is_prefill_chunk = is_prefill_chunk


def _num_new_blocks(output: SchedulerOutput, request_id: str) -> int:
    cached = output.scheduled_cached_reqs
    if request_id in cached.resumed_req_ids:
        return 0  # its whole table
    blocks = cached.new_block_ids[cached.req_ids.index(request_id)]
    return 0 if blocks is None else len(blocks[0])


def _put_back(queue: RequestQueue, request: Request) -> None:
    if request not in queue:
        queue.prepend_request(request)
