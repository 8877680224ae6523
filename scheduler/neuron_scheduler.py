"""The Neuron rules over this project's own schedulers."""

from collections.abc import Iterable

from ..reference.paging import num_blocks_for
from .admission import Admission
from .config import SchedulerConfig
from .neuron import NeuronRules
from .output import DraftTokenIds, SchedulerOutput
from .policy import NeuronPolicy, check_schedulable
from .request import Request, RequestStatus
from .scheduler import AsyncScheduler, Scheduler
from .validation import check_fields, check_kind

_DEFAULT_POLICY = NeuronPolicy()


class NeuronScheduler(NeuronRules, Scheduler):
    """Scheduler for Neuron devices: one prefill chunk or a batch of decodes in each step."""

    pads_new_decodes = False
    """A request with one token to compute is no row of a decode batch: its prompt is computed."""

    def __init__(
        self, config: SchedulerConfig, neuron_policy: NeuronPolicy = _DEFAULT_POLICY
    ) -> None:
        check_kind("neuron_policy", neuron_policy, NeuronPolicy)
        super().__init__(config)
        self._init_neuron(neuron_policy, config.prefill_buckets, config.num_blocks)
        # Decodes that one step holds, and when each was served last if they are too many.
        num_rows, draft_slots = 1 + self.num_spec_tokens, config.max_num_new_slots_for_drafting
        self._max_decodes = max(
            min(
                config.step_token_budget // num_rows,
                config.max_num_batched_tokens // (num_rows + draft_slots),
            ),
            1,
        )
        self._served: dict[str, int] = {}

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

    def step_failed(self, scheduler_output: SchedulerOutput, error: BaseException) -> None:
        """See Scheduler.step_failed; the step's padding is not counted either."""
        super().step_failed(scheduler_output, error)
        padded = scheduler_output.num_scheduled_tokens_padded
        if padded and scheduler_output.step_kind == "prefill":
            num_tokens = scheduler_output.total_num_scheduled_tokens
            self.total_padding_tokens -= sum(padded.values()) - num_tokens

    # What the base reads although this layer hides it. The literal designs hide it here too.

    def all_running(self) -> Iterable[Request]:
        """Running requests, hidden ones included."""
        if self.neuron_policy.is_literal:
            return self.running
        return self.running + self.running_holdback

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests, hidden ones included."""
        num_running, num_waiting = super().get_request_counts()
        if self.neuron_policy.is_literal:
            return num_running, num_waiting
        return (
            num_running + len(self.running_holdback),
            num_waiting + len(self.holdback_queues["waiting"]),
        )

    def drafts_after(self, request: Request, num_drafts: int) -> list[int]:
        """No drafts any more from where a row of them might not fit into max_model_len."""
        if self.neuron_policy.switches_drafts_off:
            last = self.max_model_len - 3 - 2 * self.num_spec_tokens
            request.drafts_are_off |= request.num_computed_tokens > last
            if request.drafts_are_off:
                return []
        return super().drafts_after(request, num_drafts)

    # Answers of the base.

    @property
    def at_capacity(self) -> bool:
        """Whether as many requests run as are allowed."""
        return len(self.running) >= self.max_num_active_reqs

    def _kv_cache_has_room(self, request: Request) -> bool:
        manager, admission = self.kv_cache_manager, self.neuron_policy.kv_admission
        if admission == "worst_case":
            return len(self.running) < self.max_kv_concurrent
        if admission == "reserved":
            reserved = manager.num_blocks_reserved + request.num_blocks_needed
            return reserved <= self.num_usable_blocks
        return manager.fits_to_the_end(request, keep_watermark=bool(self.running))

    def _max_concurrency(self, num_blocks: int) -> int:
        return num_blocks // num_blocks_for(self.max_model_len, self.block_size)

    def _is_ready(self, request: Request) -> bool:
        return request.drop_stale_output or request.num_stale_output_tokens == 0

    def _defers_prefills(self, throttle_prefills: bool) -> bool:
        return self.defers_prefills(throttle_prefills)

    def _base_stop(self) -> Admission:
        return self.admission_stop

    def _decodes_of_a_step(self, decodes: list[Request]) -> list[Request]:
        """All of them, or those that were served longest ago if the budget is too small for all."""
        if len(decodes) <= self._max_decodes or self.neuron_policy.is_literal:
            return decodes
        served = {r.request_id: self._served.get(r.request_id, 0) for r in decodes}
        chosen = set(sorted(served, key=served.__getitem__)[: self._max_decodes])
        self._served = served | dict.fromkeys(chosen, max(served.values()) + 1)
        return [request for request in decodes if request.request_id in chosen]

    def _num_decode_rounds(self) -> int:
        return -(-len(self.running + self.running_holdback) // self._max_decodes) or 1

    def _step_was_refused(self, output: SchedulerOutput, error: BaseException) -> None:
        super().step_failed(output, error)

    def _restore(self, running: list[Request]) -> None:
        super()._restore(running)
        if self._num_waiting() + len(self.running) < len(self.requests):
            # A failure caught a request between two queues.
            lost = self.requests.keys() - {r.request_id for r in (*self.waiting, *self.running)}
            for request_id in sorted(lost):
                request = self.requests[request_id]
                if request.status is RequestStatus.RUNNING:
                    self.running.append(request)
                else:
                    self.waiting.prepend_request(request)


class NeuronAsyncScheduler(NeuronScheduler, AsyncScheduler):
    """Neuron scheduler that decides a step before the tokens of the one in flight are known."""
