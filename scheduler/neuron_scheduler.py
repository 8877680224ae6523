"""The Neuron rules over this project's own schedulers."""

from collections.abc import Iterable, Sequence

from ..reference.paging import num_blocks_for
from .admission import Admission
from .config import PauseState, SchedulerConfig
from .neuron import NeuronRules, SchedulerState
from .output import DraftTokenIds, SchedulerOutput
from .policy import NeuronPolicy, check_schedulable, last_drafted_position
from .request import Request, RequestStatus
from .scheduler import Scheduler
from .stepping import defers_prefills
from .validation import check_fields, check_kind

_DEFAULT_POLICY = NeuronPolicy()


class NeuronScheduler(Scheduler):
    """Scheduler for Neuron devices: one prefill chunk or a batch of decodes in each step."""

    pads_new_decodes = False
    """A request with one token to compute is no row of a decode batch: its prompt is computed."""

    def __init__(
        self, config: SchedulerConfig, neuron_policy: NeuronPolicy = _DEFAULT_POLICY
    ) -> None:
        check_kind("neuron_policy", neuron_policy, NeuronPolicy)
        super().__init__(config)
        self.neuron_policy = neuron_policy
        self.repairs_vllm_faults |= not neuron_policy.is_literal
        self.num_usable_blocks = config.num_blocks - 1
        longest = num_blocks_for(config.max_model_len, config.block_size)
        self.max_kv_concurrent = neuron_policy.max_kv_concurrent(
            longest.__rfloordiv__,
            config.num_blocks,
            self.kv_cache_manager.watermark_blocks,
            config.max_num_seqs,
        )
        """Requests of max_model_len that fit into the cache at once, beside the watermark."""
        num_rows, draft_slots = 1 + self.num_spec_tokens, config.max_num_new_slots_for_drafting
        self.rules = NeuronRules(
            self,
            _Answers(self),
            neuron_policy,
            config.prefill_buckets,
            ("waiting",),
            min(
                config.step_token_budget // num_rows,
                config.max_num_batched_tokens // (num_rows + draft_slots),
            ),
        )

    @property
    def state(self) -> SchedulerState:
        """What the latest step did; IDLE as soon as nothing is queued."""
        return self.rules.state

    @property
    def total_padding_tokens(self) -> int:
        """Padding of all prefill steps."""
        return self.rules.total_padding_tokens

    def waiting_reasons(self) -> dict[str, Admission]:
        """Why the latest step did not start each waiting request, by request id."""
        return self.rules.waiting_reasons()

    def add_request(self, request: Request) -> None:
        """Queue a request.

        RequestError, nothing queued, when it is malformed, its id lives or, unless the policy is
        literal, when it could never finish.
        """
        if not self.neuron_policy.is_literal:
            check_fields(request)
            check_schedulable(request, self.config, self.is_async)
        super().add_request(request)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Set the drafts that the next step may schedule; a prompt in chunks takes none.

        ValueError, nothing changed, for lists of different lengths and, unless the policy is
        literal, for more drafts than num_speculative_tokens: no blocks are kept for them.
        """
        check_kind("draft_token_ids", draft_token_ids, DraftTokenIds)
        if not self.neuron_policy.is_literal:
            most = self.num_spec_tokens
            for tokens in draft_token_ids.draft_token_ids:
                if len(tokens) > most:
                    raise ValueError(
                        f"draft_token_ids={tokens}: must be at most num_speculative_tokens={most}"
                    )
        super().update_draft_token_ids(draft_token_ids)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Decide the next step: one prefill chunk or a batch of decodes.

        Raises what `Scheduler.schedule` raises, and RuntimeError if the literal policies mix the
        two or a step is in flight though the class is not asynchronous: decodes would run in
        alternate steps. Every request is in its queue then.
        """
        if self.steps_in_flight and not self.is_async:
            num_steps = len(self.steps_in_flight)
            raise RuntimeError(f"{num_steps} step is in flight: use NeuronAsyncScheduler")
        try:
            return self.rules.schedule(super().schedule, throttle_prefills)
        except BaseException:
            self._find_lost()
            raise

    def step_failed(self, scheduler_output: SchedulerOutput, error: BaseException) -> None:
        """See Scheduler.step_failed; the step's padding is not counted either."""
        super().step_failed(scheduler_output, error)
        padded = scheduler_output.num_scheduled_tokens_padded
        if padded:
            num_tokens = scheduler_output.total_num_scheduled_tokens
            self.rules.total_padding_tokens -= sum(padded.values()) - num_tokens

    # What the base reads although the rules hide it. The literal designs hide it here too.

    def all_running(self) -> Iterable[Request]:
        """Running requests, hidden ones included."""
        if self.neuron_policy.is_literal:
            return self.running
        return self.running + self.rules.holdback.running

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests, hidden ones included."""
        return self.rules.counted(super().get_request_counts())

    def drafts_after(self, request: Request, num_drafts: int) -> list[int]:
        """No drafts any more from where a row of them might not fit into max_model_len."""
        if self.neuron_policy.switches_drafts_off:
            last = last_drafted_position(self.max_model_len, self.num_spec_tokens)
            request.drafts_are_off |= request.num_computed_tokens > last
            if request.drafts_are_off:
                return []
        return super().drafts_after(request, num_drafts)

    def _find_lost(self) -> None:
        """Queue the requests that a failure caught between two queues."""
        lost = self.requests.keys() - {r.request_id for r in (*self.waiting, *self.running)}
        for request_id in sorted(lost):
            request = self.requests[request_id]
            if request.status is RequestStatus.RUNNING:
                self.running.append(request)
            else:
                self.waiting.prepend_request(request)


class NeuronAsyncScheduler(NeuronScheduler):
    """Neuron scheduler that decides a step before the tokens of the one in flight are known."""

    is_async = True


class _Answers:
    """What the Neuron rules ask about a scheduler of this project."""

    def __init__(self, scheduler: NeuronScheduler) -> None:
        self._scheduler = scheduler
        self._admission = scheduler.neuron_policy.kv_admission

    def at_capacity(self) -> bool:
        return len(self._scheduler.running) >= self._scheduler.max_num_active_reqs

    def may_admit(self, request: Request) -> bool:
        return self._scheduler._pause_state is PauseState.UNPAUSED

    def is_ready(self, request: Request) -> bool:
        return request.drop_stale_output or request.num_stale_output_tokens == 0

    def has_room(self, request: Request) -> bool:
        scheduler, manager = self._scheduler, self._scheduler.kv_cache_manager
        if self._admission == "worst_case":
            return len(scheduler.running) < scheduler.max_kv_concurrent
        # The base leaves it free too: a request that it then refuses would cost a step.
        spare = manager.watermark_blocks if scheduler.running else 0
        if self._admission == "reserved":
            reserved = manager.num_blocks_reserved + request.num_blocks_needed
            return reserved + spare <= scheduler.num_usable_blocks
        return manager.fits_to_the_end(request, spare)

    def adds_no_prefill(self, request: Request) -> bool:
        return False

    def defers_prefills(self, throttle_prefills: bool) -> bool:
        return defers_prefills(self._scheduler, throttle_prefills)

    def queues_in_turn(self) -> Sequence[str]:
        return ("waiting",)

    def reason_of_stop(self) -> Admission:
        return self._scheduler.admission_stop

    def take_back(self, output: SchedulerOutput, error: BaseException) -> None:
        Scheduler.step_failed(self._scheduler, output, error)
