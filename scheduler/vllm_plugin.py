"""The Neuron rules over vLLM's own schedulers, for vLLM's `scheduler_cls`.

    LLM(model, scheduler_cls="segattn.scheduler.vllm_plugin.NeuronAsyncScheduler",
        additional_config={"neuron_config": {"num_batched_tokens_buckets": [512, 2048]}})

`neuron_config` may hold `num_batched_tokens_buckets`, `num_seqs_buckets` and `neuron_policy`, a
table of NeuronPolicy fields. Works with vLLM 0.24 to 0.33. Rules that changed between releases are
told apart by the release; docs/scheduler.md lists what the base reads while requests are hidden.
"""

from typing import Any

from .admission import Admission
from .config import PauseState
from .neuron import NeuronRules, SchedulerState
from .output import SchedulerOutput
from .policy import last_drafted_position, unschedulable_reason
from .request import Request
from .vllm_options import NeuronOptions

try:
    from vllm.logger import init_logger
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.request import RequestStatus

    from .vllm_answers import QUEUE_NAMES, RELEASE, VllmAnswers
except ImportError as error:
    raise ImportError(
        f"segattn.scheduler.vllm_plugin needs vLLM 0.24 or newer, extra 'vllm': {error}"
    ) from error

logger = init_logger(__name__)

_MIN_TOKENS_OUTLAST_LENGTH = RELEASE < (0, 29)
"""No request ends before min_tokens, not even at max_model_len."""


class NeuronScheduler(Scheduler):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's scheduler with the Neuron rules."""

    _is_async = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check_settings()
        options = NeuronOptions.read(self.vllm_config.additional_config)
        largest_chunk = min(self.scheduler_config.max_num_batched_tokens, self.max_model_len)
        self.decode_buckets = options.decode_buckets(self.max_num_running_reqs)
        self.neuron_policy = policy = options.neuron_policy
        self.admission_counts = dict.fromkeys(Admission, 0)
        self._refused: list[tuple[Request, str]] = []
        self.answers = answers = VllmAnswers(self, self._is_async)
        self.max_kv_concurrent = policy.max_kv_concurrent(
            answers.max_requests,
            self.kv_cache_config.num_blocks,
            self.kv_cache_manager.watermark_blocks,
            self.max_num_running_reqs,
        )
        self.rules = NeuronRules(
            self,
            answers,
            policy,
            options.prefill_buckets(largest_chunk),
            ("waiting",) if policy.is_literal else QUEUE_NAMES,
            answers.max_decodes(),
        )
        answers.holdback = self.rules.holdback
        if not policy.is_literal:
            self._guard_watermark()
        logger.info(
            "Neuron rules: prefill buckets %s, decode buckets %s, at most %d requests of "
            "max_model_len in %d KV blocks, %s",
            self.rules.prefill_buckets,
            self.decode_buckets,
            self.max_kv_concurrent,
            answers.num_usable_blocks,
            policy,
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

    def _check_settings(self) -> None:
        """ValueError for settings of the engine under which the Neuron rules cannot hold."""
        if bool(self.scheduler_config.async_scheduling) != self._is_async:
            fitting = "NeuronScheduler" if self._is_async else "NeuronAsyncScheduler"
            raise ValueError(
                f"async_scheduling={self.scheduler_config.async_scheduling}: must be "
                f"{self._is_async} for {type(self).__name__}; or use {fitting}"
            )
        if self.dynamic_sd_lookup is not None:
            # The count of drafts follows the requests of a step, and a prefill step has one.
            raise ValueError(
                "num_speculative_tokens_per_batch_size: must be unset, the rows of a decode batch "
                "would have different numbers of drafts"
            )

    def _guard_watermark(self) -> None:
        """Let the watermark hold for a prefill although the running requests are hidden from it.

        vLLM keeps the watermark free unless nothing runs, and sees nothing run then.
        """
        manager: Any = self.kv_cache_manager
        allocate_slots = manager.allocate_slots

        def guarded(*args: Any, has_scheduled_reqs: bool = True, **kwargs: Any) -> Any:
            has_others = has_scheduled_reqs or bool(self.rules.holdback.running)
            return allocate_slots(*args, has_scheduled_reqs=has_others, **kwargs)

        manager.allocate_slots = guarded

    # Requests come and go.

    def add_request(self, request: Request) -> None:
        """Queue a request, or end it with an error if it could never finish.

        vLLM's engine does not survive an exception here, so a refused request is reported by the
        next step like one that failed.
        """
        self.answers.has_streams |= request.resumable  # type: ignore[attr-defined]  # vLLM's request
        reason = None
        if not self.neuron_policy.is_literal and request.request_id not in self.requests:
            reason = self._unschedulable_reason(request)
        if reason is None:
            super().add_request(request)
            return
        logger.error("Request %s refused: %s", request.request_id, reason)
        request.status = RequestStatus.FINISHED_ERROR
        self._refused.append((request, reason))
        # Keeps the engine stepping until the refusal is delivered; workers ignore unknown ids.
        self.finished_req_ids.add(request.request_id)
        if self.finished_req_ids_dict is not None:
            self.finished_req_ids_dict[_client_index(request)].add(request.request_id)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, with the requests that were refused since the latest call."""
        outputs: Any = super().update_from_output(*args, **kwargs)
        refused, self._refused = self._refused, []
        for request, reason in refused:
            client_outputs = outputs.setdefault(_client_index(request), EngineCoreOutputs())
            client_outputs.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    stop_reason=reason,
                )
            )
        return outputs

    def _unschedulable_reason(self, request: Any) -> str | None:
        # Pooling requests have no sampling parameters.
        can_hang = _MIN_TOKENS_OUTLAST_LENGTH and request.sampling_params is not None
        return unschedulable_reason(
            request.num_prompt_tokens,
            request.max_tokens,
            request.sampling_params.min_tokens if can_hang else 0,
            self.max_model_len,
            self.answers.num_blocks_needed(request),
            self.answers.num_usable_blocks,
        )

    # The step.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """See NeuronRules.schedule; `throttle_prefills` comes from data-parallel serving."""
        if self.answers.decode_node is not None:
            self.answers.decode_node.joining = None
        output = self.rules.schedule(super().schedule, throttle_prefills)
        is_open = not self.rules.is_decode_turn and self._pause_state == PauseState.UNPAUSED
        if not self.neuron_policy.is_literal and is_open:
            # The base saw at most one waiting request when it set this.
            refusals = self.rules.refusals.values()
            num_blocked = sum(why is Admission.BLOCKED for why in refusals)
            self.prefill_capacity_bound = self.rules.holdback.num_shown() > num_blocked
        return output

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests; the base asks during a step too, when most are hidden."""
        return self.rules.counted(super().get_request_counts())


class NeuronAsyncScheduler(NeuronScheduler, AsyncScheduler):  # type: ignore[misc]  # untyped
    """vLLM's asynchronous scheduler with the Neuron rules."""

    _is_async = True

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """As vLLM's, without drafts from where a row of them might not fit into max_model_len."""
        super()._update_after_schedule(scheduler_output)
        if self.num_spec_tokens and self.neuron_policy.switches_drafts_off:
            last = last_drafted_position(self.max_model_len, self.num_spec_tokens)
            for request_id in scheduler_output.num_scheduled_tokens:
                request = self.requests[request_id]
                if request.is_prefill_chunk:
                    continue
                if request.num_computed_tokens > last:
                    request.drafts_are_off = True
                if getattr(request, "drafts_are_off", False):
                    request.spec_token_ids = []


def _client_index(request: Any) -> int:
    """Which front end a request came from."""
    return int(request.client_index)
