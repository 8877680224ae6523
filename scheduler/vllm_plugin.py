"""The Neuron rules over vLLM's own schedulers, for vLLM's `scheduler_cls`.

    LLM(model, scheduler_cls="segattn.scheduler.vllm_plugin.NeuronAsyncScheduler",
        additional_config={"neuron_config": {"num_batched_tokens_buckets": [512, 2048]}})

`neuron_config` may hold `num_batched_tokens_buckets`, `num_seqs_buckets` and `neuron_policy`, a
table of NeuronPolicy fields. Works with vLLM 0.24 to 0.33. Rules that changed between releases are
told apart by the release; docs/scheduler.md lists what the base reads while requests are hidden.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ..reference.paging import cdiv
from .admission import Admission
from .config import PauseState
from .decode_node import DecodeNode
from .neuron import NeuronRules
from .output import SchedulerOutput
from .policy import (
    draft_tokens_in_flight,
    num_tokens_to_hold,
    unschedulable_reason,
)
from .request import Request
from .vllm_options import NeuronOptions

try:
    from vllm.logger import init_logger
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.request import RequestStatus
    from vllm.version import __version_tuple__
except ImportError as error:
    raise ImportError(
        f"segattn.scheduler.vllm_plugin needs vLLM 0.24 or newer, extra 'vllm': {error}"
    ) from error

logger = init_logger(__name__)

RELEASE: tuple[int, int] = __version_tuple__[:2]

_STREAMS_HOLD_SEATS = RELEASE >= (0, 25)
"""A stream that waits for its next input counts as running when requests are admitted."""
_MIN_TOKENS_OUTLAST_LENGTH = RELEASE < (0, 29)
"""No request ends before min_tokens, not even at max_model_len."""
_BLOCK_OWNERS_QUEUE_APART = RELEASE >= (0, 31)
"""Waiting requests that own blocks have a queue of their own, served while new requests are paused;
before, requests that wait for something else than their turn had one."""


class NeuronScheduler(NeuronRules, Scheduler):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's scheduler with the Neuron rules."""

    _is_async = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check_settings()
        options = NeuronOptions.read(self.vllm_config.additional_config)
        largest_chunk = min(self.scheduler_config.max_num_batched_tokens, self.max_model_len)
        self.decode_buckets = options.decode_buckets(self.max_num_running_reqs)
        self.admission_counts = dict.fromkeys(Admission, 0)
        self._refused: list[tuple[Request, str]] = []
        self._decode_node: DecodeNode | None = None
        self._has_streams = False
        self._group_limits = self._read_group_limits()
        side_queue = "kv_holding_waiting" if _BLOCK_OWNERS_QUEUE_APART else "skipped_waiting"
        self.waiting_queue_names = (side_queue, "waiting")
        self._init_neuron(
            options.neuron_policy,
            options.prefill_buckets(largest_chunk),
            self.kv_cache_config.num_blocks,
        )
        if not self.neuron_policy.is_literal:
            self._guard_watermark()
            if self.connector is not None:
                self._decode_node = DecodeNode(self.connector)
        logger.info(
            "Neuron rules: prefill buckets %s, decode buckets %s, at most %d requests of "
            "max_model_len in %d KV blocks, %s",
            self.prefill_buckets,
            self.decode_buckets,
            self.max_kv_concurrent,
            self.num_usable_blocks,
            self.neuron_policy,
        )

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

    def _read_group_limits(self) -> list[tuple[int, int]]:
        """Tokens per block and most blocks of one request, for each group of layers."""
        parallel = self.vllm_config.parallel_config
        context_parallel = (
            parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
        )
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        return [
            (
                spec.block_size * context_parallel,
                cdiv(spec.max_memory_usage_bytes(self.vllm_config), spec.page_size_bytes),
            )
            for spec in specs
        ]

    def _guard_watermark(self) -> None:
        """Let the watermark hold for a prefill although the running requests are hidden from it.

        vLLM keeps the watermark free unless nothing runs, and sees nothing run then.
        """
        manager: Any = self.kv_cache_manager
        allocate_slots = manager.allocate_slots

        def guarded(*args: Any, has_scheduled_reqs: bool = True, **kwargs: Any) -> Any:
            has_others = has_scheduled_reqs or bool(self.running_holdback)
            return allocate_slots(*args, has_scheduled_reqs=has_others, **kwargs)

        manager.allocate_slots = guarded

    # Requests come and go.

    def add_request(self, request: Request) -> None:
        """Queue a request, or end it with an error if it could never finish.

        vLLM's engine does not survive an exception here, so a refused request is reported by the
        next step like one that failed.
        """
        self._has_streams |= request.resumable  # type: ignore[attr-defined]  # vLLM's request
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
            self._num_blocks_needed(request),
            self.num_usable_blocks,
        )

    # The step.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """See NeuronRules.schedule; `throttle_prefills` comes from data-parallel serving."""
        if self._decode_node is not None:
            self._decode_node.joining = None
        output = super().schedule(throttle_prefills)
        is_open = not self._decode_turn and self._pause_state == PauseState.UNPAUSED
        if not self.neuron_policy.is_literal and is_open:
            # The base saw at most one waiting request when it set this.
            num_blocked = sum(why is Admission.BLOCKED for why in self._refusals.values())
            self.prefill_capacity_bound = self._num_waiting() > num_blocked
        return output

    def _separate_phases(self) -> None:
        """Let decodes run beside a request that adds no prefill."""
        shown = [request for name in self.holdback_queues for request in getattr(self, name)]
        if (
            self._decode_node is not None
            and len(shown) == 1
            and not self.has_prefill_in_running
            and self._decode_node.adds_no_prefill(shown[0])
        ):
            self._decode_node.joining = shown[0]
        else:
            super()._separate_phases()

    def _finish_step(self, output: SchedulerOutput, refusals: dict[str, Admission]) -> None:
        node = self._decode_node
        if node is not None and node.joining is not None and output.num_scheduled_tokens:
            # The last token of a prompt that was computed elsewhere is no prefill.
            output.step_kind = "decode"
        super()._finish_step(output, refusals)

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests; the base asks during a step too, when most are hidden.

        The hidden ones count, but not in the literal policies, as in the design document.
        """
        num_running, num_waiting = super().get_request_counts()
        if self.neuron_policy.is_literal:
            return num_running, num_waiting
        num_held = sum(map(len, self.holdback_queues.values()))
        return num_running + len(self.running_holdback), num_waiting + num_held

    # Answers of the base.

    @property
    def at_capacity(self) -> bool:
        """Whether as many requests run, or hold a place for their next input, as are allowed."""
        num_active = len(self.running)
        if _STREAMS_HOLD_SEATS:
            num_active += self.num_waiting_for_streaming_input
        # 0.31 and newer may admit fewer requests than may run.
        return num_active >= getattr(self, "max_num_active_reqs", self.max_num_running_reqs)

    def _max_concurrency(self, num_blocks: int) -> int:
        if not self.kv_cache_config.kv_cache_groups:
            return num_blocks * self.block_size // self.max_model_len
        kv_cache_config = replace(self.kv_cache_config, num_blocks=num_blocks)
        return int(get_max_concurrency_for_kv_cache_config(self.vllm_config, kv_cache_config))

    def _num_blocks_needed(self, request: Request) -> int:
        num_tokens = num_tokens_to_hold(
            request.num_prompt_tokens,
            request.max_tokens,
            self.max_model_len,
            draft_tokens_in_flight(self.num_spec_tokens, self._is_async),
            self.num_lookahead_tokens,
        )
        return sum(
            min(cdiv(num_tokens, block_size), most) for block_size, most in self._group_limits
        )

    def _is_ready(self, request: Any) -> bool:
        if hasattr(self, "_handle_blocked_waiting_request"):
            is_ready = self._handle_blocked_waiting_request(request)
        else:
            is_blocked = self._is_blocked_waiting_status(request.status)
            is_ready = not is_blocked or self._try_promote_blocked_waiting_request(request)
        # From 0.27 on a preempted request waits for the tokens that were in flight.
        awaits_tokens = getattr(request, "num_stale_output_tokens", 0)
        if awaits_tokens and not request.drop_stale_output:
            return False
        return bool(is_ready) and self._adapter_fits(request)

    def _adapter_fits(self, request: Any) -> bool:
        """Whether a decode batch of all running requests and this one has adapters enough."""
        if not self.lora_config or not request.lora_request:
            return True
        running: list[Any] = [*self.running, request]
        adapters = {other.lora_request.lora_int_id for other in running if other.lora_request}
        return len(adapters) <= int(self.lora_config.max_loras)

    def _may_admit(self, request: Request) -> bool:
        if self._pause_state == PauseState.PAUSED_NEW and _BLOCK_OWNERS_QUEUE_APART:
            return self._owns_blocks(request)
        return super()._may_admit(request)

    def _waiting_with_blocks(self) -> Iterator[Request]:
        if self.connector is None and not self._has_streams:
            return iter(())
        queues = chain(
            self.holdback_queues.values(), (getattr(self, name) for name in self.holdback_queues)
        )
        return (request for queue in queues for request in queue if self._owns_blocks(request))

    def _owns_blocks(self, request: Request) -> bool:
        return bool(
            request.num_computed_tokens > 0
            or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        )

    def _queues_in_turn(self) -> Sequence[str]:
        names = self.waiting_queue_names
        if self.scheduler_config.policy == "priority" and not _BLOCK_OWNERS_QUEUE_APART:
            # Until 0.30 vLLM compares the heads of its two queues; requests order themselves.
            heads: list[tuple[Any, str]] = [
                (self.holdback_queues[name].peek_request(), name)
                for name in names
                if self.holdback_queues[name]
            ]
            return [name for _, name in sorted(heads, key=lambda head: head[0])]
        return names

    def _defers_prefills(self, throttle_prefills: bool) -> bool:
        if self.prefill_capacity_bound:
            return False
        interval = getattr(self, "local_prefill_interval", 1)
        return throttle_prefills or (
            interval > 1 and self.num_executed_steps + 1 - self.last_prefill_step < interval
        )

    def _base_stop(self) -> Admission:
        return Admission.NOT_SCHEDULED

    def _note_refusals(self, refusals: dict[str, Admission]) -> None:
        super()._note_refusals(refusals)
        # vLLM's schedulers do not count what they leave.
        num_shown = sum(len(getattr(self, name)) for name in self.holdback_queues)
        self.admission_counts[Admission.NOT_SCHEDULED] += num_shown


class NeuronAsyncScheduler(NeuronScheduler, AsyncScheduler):  # type: ignore[misc]  # untyped
    """vLLM's asynchronous scheduler with the Neuron rules."""

    _is_async = True


def _client_index(request: Any) -> int:
    """Which front end a request came from."""
    return int(request.client_index)
