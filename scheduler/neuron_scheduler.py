"""The Neuron rules over this project's own schedulers."""

from ..reference.paging import num_blocks_for
from .admission import Admission
from .async_scheduler import AsyncScheduler
from .config import SchedulerConfig
from .neuron import NeuronRules
from .output import DraftTokenIds
from .policy import NeuronPolicy, check_schedulable, num_blocks_needed
from .request import Request
from .scheduler import Scheduler
from .validation import check_fields, check_kind

_DEFAULT_POLICY = NeuronPolicy()


class NeuronScheduler(NeuronRules, Scheduler):
    """Scheduler for Neuron devices: one prefill chunk or a batch of decodes in each step."""

    _is_async = False

    def __init__(
        self, config: SchedulerConfig, neuron_policy: NeuronPolicy = _DEFAULT_POLICY
    ) -> None:
        check_kind("neuron_policy", neuron_policy, NeuronPolicy)
        super().__init__(config)
        self._init_neuron(neuron_policy, config.prefill_buckets, config.num_blocks)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        RequestError, nothing queued, when it is malformed, its id lives or, by policy, when it
        could never finish.
        """
        if self.neuron_policy.refuse_unschedulable:
            check_fields(request)
            check_schedulable(request, self.config, self._is_async)
        super().add_request(request)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Set the drafts that the next step may schedule; a prompt in chunks takes none.

        ValueError, nothing changed, for lists of different lengths and, by policy, for more drafts
        than num_speculative_tokens: no blocks are kept for them.
        """
        check_kind("draft_token_ids", draft_token_ids, DraftTokenIds)
        if self.neuron_policy.refuse_unschedulable:
            most = self.num_spec_tokens
            for tokens in draft_token_ids.draft_token_ids:
                if len(tokens) > most:
                    raise ValueError(
                        f"draft_token_ids={tokens}: must be at most num_speculative_tokens={most}"
                    )
        super().update_draft_token_ids(draft_token_ids)

    def _max_concurrency(self, num_blocks: int) -> int:
        return num_blocks // num_blocks_for(self.max_model_len, self.block_size)

    def _num_blocks_needed(self, request: Request) -> int:
        return num_blocks_needed(request, self.config, self._is_async)

    def _defers_prefills(self, throttle_prefills: bool) -> bool:
        return throttle_prefills and not self._prefill_capacity_bound

    def _base_stop(self) -> Admission:
        return self.admission_stop


class NeuronAsyncScheduler(NeuronScheduler, AsyncScheduler):
    """Neuron scheduler that decides a step before the tokens of the one in flight are known."""

    _is_async = True
