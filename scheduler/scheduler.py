"""vLLM V1's scheduler for one full-attention KV cache group."""

from collections.abc import Iterable

from .admission import Admission
from .config import PauseState, SchedulerConfig
from .errors import RequestError
from .integrity import check_integrity
from .kv_cache_manager import KVCacheManager
from .output import (
    DraftTokenIds,
    EngineCoreOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from .policy import num_blocks_needed
from .recovery import settle, take_back
from .request import Request, RequestStatus
from .request_queue import RequestQueue, create_request_queue
from .results import check_results, drafts_by_request, forget, place_drafts, receive
from .step import Step
from .stepping import decide, note
from .validation import check_kind, check_request


class Scheduler:
    """Decides who computes how many tokens in each step, and in which blocks.

    Every decision equals vLLM 0.33's. A step counts as computed when it is scheduled;
    `update_from_output` takes its tokens in, `step_failed` takes it back. Several may be in flight.
    A call that refuses its arguments changes nothing. One that is interrupted leaves no step, block
    or request half changed; requests that it preempted wait.
    """

    is_async = False
    """Whether steps are decided before the tokens of those in flight are known."""
    pads_new_decodes = True
    """Whether a request with one token to compute is admitted with draft placeholders, so that it
    fits into a batch of decodes with drafts."""

    def __init__(self, config: SchedulerConfig) -> None:
        check_kind("config", config, SchedulerConfig)
        self.config = config
        self.max_num_running_reqs = config.max_num_seqs
        self.max_num_active_reqs = config.max_num_active_seqs or config.max_num_seqs
        self.max_model_len = config.max_model_len
        self.step_token_budget = config.step_token_budget
        self.block_size = config.block_size
        self.repairs_vllm_faults = config.repair_vllm_faults
        self.num_spec_tokens = config.num_speculative_tokens
        self.kv_cache_manager = KVCacheManager(config)
        self.requests: dict[str, Request] = {}
        """Live requests in the order in which they were added."""
        self.waiting: RequestQueue = create_request_queue(config.policy)
        self.running: list[Request] = []
        self.finished_req_ids: set[str] = set()
        """Requests finished since the latest step; the next one reports them."""
        self.preempted_req_ids: set[str] = set()
        """Requests preempted since the latest step; the next one reports them."""
        self.admission_stop = Admission.ADMITTED
        """Why the latest step admitted no further request."""
        self.admission_counts = dict.fromkeys(Admission, 0)
        """Waiting requests by reason, summed over the steps."""
        self.steps_in_flight: list[Step] = []
        """Steps with tokens that were scheduled and have not come back, the oldest first."""
        self.told_anew: set[str] = set()
        """Running requests of failed steps: the next step that has them reports all of them."""
        self.deferred: set[str] = set()
        """Waiting requests that were passed over, since tokens of theirs are in flight."""
        self.prefill_capacity_bound = False
        self.previously_scheduled: set[str] = set()
        self.num_executed_steps = 0
        self.last_prefill_step = -config.prefill_schedule_interval
        self._pause_state = PauseState.UNPAUSED

    # Requests come and go.

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken, those that only the prefix cache holds included."""
        return self.kv_cache_manager.num_free_blocks

    def add_request(self, request: Request) -> None:
        """Queue a request. RequestError, nothing queued, when it is malformed or its id lives."""
        packed_prompt = check_request(request)
        if request.request_id in self.requests:
            raise RequestError(request.request_id, "a request of this id is not finished yet")
        request.max_num_tokens = min(
            request.num_prompt_tokens + request.max_tokens, self.max_model_len
        )
        request.num_blocks_needed = num_blocks_needed(request, self.config, self.is_async)
        self.kv_cache_manager.hash_prompt(request, packed_prompt)
        self.waiting.add_request(request)
        self.requests[request.request_id] = request

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        """End requests from outside, for example because a client went away; None: all of them.

        Their blocks are free at once, even while a step computes them. Returns the ids really
        finished, in the order given: unknown and finished ones are ignored.
        """
        if not (isinstance(finished_status, RequestStatus) and finished_status.is_finished):
            raise ValueError(f"finished_status={finished_status!r}: must be a finished status")
        if request_ids is None:
            request_ids = self.requests
        elif isinstance(request_ids, str):
            request_ids = (request_ids,)
        check_kind("request_ids", request_ids, Iterable)
        live = self.requests
        requests = [live[name] for name in dict.fromkeys(request_ids) if name in live]
        try:
            for request in requests:
                request.status = finished_status
            return forget(self, requests)
        except BaseException:
            settle(self)
            raise

    def preempt(self, request: Request, *, drop_stale_output: bool) -> None:
        """Take a request's blocks and queue it again; the caller took it out of `running`."""
        request.status = RequestStatus.PREEMPTED
        self.kv_cache_manager.free([request])
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.drop_stale_output = drop_stale_output or (
            request.drop_stale_output and request.num_stale_output_tokens > 0
        )
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        self.preempted_req_ids.add(request.request_id)
        self.waiting.prepend_request(request)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes, for example after a change of weights.

        False, nothing changed, while requests own blocks, unless `reset_running_requests`: then
        these are preempted, and tokens of theirs that are still in flight will be dropped.
        """
        check_kind("reset_running_requests", reset_running_requests, bool)
        try:
            if reset_running_requests:
                # From the end, so that the queue starts with the running order.
                while self.running:
                    self.preempt(self.running.pop(), drop_stale_output=True)
                self.previously_scheduled = set()
            return self.kv_cache_manager.reset_prefix_cache()
        except BaseException:
            settle(self)
            raise

    # Pause and counts.

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Stop admitting or scheduling, or go on."""
        self._pause_state = PauseState(pause_state)

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests."""
        return len(self.running), len(self.waiting)

    def get_num_unfinished_requests(self) -> int:
        """Requests that the pause state lets go on."""
        if self._pause_state is PauseState.PAUSED_ALL:
            return 0
        num_running, num_waiting = self.get_request_counts()
        return num_running + num_waiting * (self._pause_state is PauseState.UNPAUSED)

    def has_requests(self) -> bool:
        """Whether another step is due: for unfinished requests or to report finished ones."""
        return bool(self.finished_req_ids or self.get_num_unfinished_requests())

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

    # The step.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Decide the next step.

        `throttle_prefills` puts prefills off while something decodes, as data-parallel serving asks
        for, unless the latest admissions ended with requests still waiting.
        """
        config, paused_all = self.config, self._pause_state is PauseState.PAUSED_ALL
        budget = 0 if paused_all else self.step_token_budget
        step = Step(budget, config.max_num_batched_tokens, config.max_num_new_slots_for_drafting)
        running = self.running.copy()
        self.kv_cache_manager.newly_cached = step.newly_cached
        try:
            output = decide(self, step, throttle_prefills)
            note(self, step)
        except BaseException:
            take_back(self, step, running)
            raise
        return output

    def step_failed(self, scheduler_output: SchedulerOutput, error: BaseException) -> None:
        """Take back the newest step in flight, whose execution failed with `error`.

        Its requests have computed what they had before, those it admitted wait again, its blocks
        are free and nobody finds what it should have filled. Requests that it preempted wait: their
        blocks may be overwritten. The next step tells the runner again what this one told: finished
        and preempted ids, and whole block tables, as of resumed requests. ValueError, nothing
        changed, for another step.
        """
        check_kind("scheduler_output", scheduler_output, SchedulerOutput)
        if scheduler_output.num_scheduled_tokens:
            newest = self.steps_in_flight[-1:]
            if not newest or newest[0].output is not scheduler_output:
                raise ValueError("scheduler_output: must be the newest step in flight") from error
            take_back(self, newest[0], self.running)
        self.finished_req_ids |= scheduler_output.finished_req_ids
        self.preempted_req_ids |= scheduler_output.preempted_req_ids

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Append the tokens of a step, end the requests that they complete, and report both.

        Requests that ended meanwhile are passed over, also when their id lives again. ValueError,
        nothing changed, for a step that is not the oldest in flight, and when the output lacks a
        token of a request that had to sample, has one of another, more than the step can give, or
        something else than tokens.
        """
        check_kind("scheduler_output", scheduler_output, SchedulerOutput)
        check_kind("model_runner_output", model_runner_output, ModelRunnerOutput)
        in_flight = self.steps_in_flight
        if not scheduler_output.num_scheduled_tokens:
            check_results(Step(0, 0, 0), model_runner_output, self.requests)
            return []
        if not in_flight or in_flight[0].output is not scheduler_output:
            raise ValueError("scheduler_output: must be the oldest step in flight")
        sampled = check_results(in_flight[0], model_runner_output, self.requests)
        return receive(self, in_flight[0], sampled)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Set the drafts that the next step may schedule; a prompt in chunks takes none.

        ValueError, nothing changed, for lists of different lengths.
        """
        for request_id, tokens in drafts_by_request(draft_token_ids):
            request = self.requests.get(request_id)
            if request is not None:
                request.spec_token_ids = [] if request.is_prefill_chunk else tokens

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Put drafts in the place of the -1 with which an asynchronous step was scheduled.

        A request gets as many as the step has for it; missing ones stay -1 and are counted in
        `num_invalid_spec_tokens`. ValueError, nothing changed, for lists of different lengths.
        """
        check_kind("scheduler_output", scheduler_output, SchedulerOutput)
        place_drafts(drafts_by_request(draft_token_ids), scheduler_output, self.requests)

    # What a layer that hides requests answers for them.

    def all_running(self) -> Iterable[Request]:
        """Running requests, those included that this step may not schedule."""
        return self.running

    def drafts_after(self, request: Request, num_drafts: int) -> list[int]:
        """Placeholders for the drafts of an asynchronous request's next step."""
        return [-1] * num_drafts


class AsyncScheduler(Scheduler):
    """Scheduler with steps in flight while the next is decided.

    A scheduled request that will sample gets an output placeholder for the token (and one for each
    draft), so that the next step can go on from it; the token takes the placeholder's place when it
    arrives.
    """

    is_async = True
