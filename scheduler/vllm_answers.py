"""What the Neuron rules ask about vLLM's schedulers, of whatever release."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ..reference.paging import cdiv
from .admission import Admission
from .config import PauseState
from .decode_node import DecodeNode
from .holdback import Holdback
from .output import SchedulerOutput
from .policy import draft_tokens_in_flight, num_tokens_to_hold

try:
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.request import RequestStatus
    from vllm.version import __version_tuple__
except ImportError as error:
    raise ImportError(f"segattn.scheduler.vllm_answers needs extra 'vllm': {error}") from error

RELEASE: tuple[int, int] = __version_tuple__[:2]

_STREAMS_HOLD_SEATS = RELEASE >= (0, 25)
"""A stream that waits for its next input counts as running when requests are admitted."""
_BLOCK_OWNERS_QUEUE_APART = RELEASE >= (0, 31)
"""Waiting requests that own blocks have a queue of their own, served while new requests are paused;
before, requests that wait for something else than their turn had one."""

QUEUE_NAMES = ("kv_holding_waiting" if _BLOCK_OWNERS_QUEUE_APART else "skipped_waiting", "waiting")
"""The waiting queues in the order in which vLLM looks at them."""


class VllmAnswers:
    """Answers for one scheduler of vLLM's, to which the plugin has given its `neuron_policy`."""

    def __init__(self, scheduler: Any, is_async: bool) -> None:
        self._scheduler = scheduler
        self._is_async = is_async
        self._policy = scheduler.neuron_policy
        self.holdback: Holdback | None = None
        """Where hidden requests are, as soon as the rules are there."""
        self.decode_node: DecodeNode | None = None
        self.has_streams = False
        self.num_usable_blocks: int = scheduler.kv_cache_config.num_blocks - 1
        self._group_limits = self._read_group_limits()
        groups = scheduler.kv_cache_config.kv_cache_groups
        # In a window or a recurrent state a request gives up blocks that it would have to share.
        self._can_share = len(groups) == 1 and isinstance(
            groups[0].kv_cache_spec, FullAttentionSpec
        )
        if not self._policy.is_literal and scheduler.connector is not None:
            self.decode_node = DecodeNode(scheduler.connector)

    def _read_group_limits(self) -> list[tuple[int, int]]:
        """Tokens per block and most blocks of one request, for each group of layers."""
        vllm_config = self._scheduler.vllm_config
        parallel = vllm_config.parallel_config
        context_parallel = (
            parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
        )
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        return [
            (
                spec.block_size * context_parallel,
                cdiv(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes),
            )
            for spec in (group.kv_cache_spec for group in groups)
        ]

    def max_requests(self, num_blocks: int) -> int:
        """Requests of max_model_len that fit into `num_blocks` at once."""
        scheduler = self._scheduler
        if not scheduler.kv_cache_config.kv_cache_groups:
            return int(num_blocks * scheduler.block_size // scheduler.max_model_len)
        cache = replace(scheduler.kv_cache_config, num_blocks=num_blocks)
        return int(get_max_concurrency_for_kv_cache_config(scheduler.vllm_config, cache))

    def num_blocks_needed(self, request: Any) -> int:
        """Most blocks that `request` can own at a time."""
        num_tokens = num_tokens_to_hold(
            request.num_prompt_tokens,
            request.max_tokens,
            self._scheduler.max_model_len,
            draft_tokens_in_flight(self._scheduler.num_spec_tokens, self._is_async),
            self._scheduler.num_lookahead_tokens,
        )
        return sum(
            min(cdiv(num_tokens, block_size), most) for block_size, most in self._group_limits
        )

    def max_decodes(self) -> int:
        """Decodes that the budgets of a step hold, drafts counted."""
        scheduler = self._scheduler
        num_rows = 1 + scheduler.num_spec_tokens
        speculative = scheduler.vllm_config.speculative_config
        # 0.29 and newer keep room for tokens that the drafter adds.
        draft_slots = getattr(speculative, "max_num_new_slots_for_drafting", 0)
        max_input_tokens = scheduler.scheduler_config.max_num_batched_tokens
        most = min(
            scheduler.max_num_scheduled_tokens // num_rows,
            max_input_tokens // (num_rows + draft_slots),
        )
        return max(int(most), 1)

    def at_capacity(self) -> bool:
        """Whether as many requests run, or hold a place for their next input, as are allowed."""
        scheduler = self._scheduler
        num_active: int = len(scheduler.running)
        if _STREAMS_HOLD_SEATS:
            num_active += scheduler.num_waiting_for_streaming_input
        # 0.31 and newer may admit fewer requests than may run.
        most: int = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
        return num_active >= most

    def may_admit(self, request: Any) -> bool:
        """Whether the pause state lets `request` start."""
        pause_state = self._scheduler._pause_state
        if pause_state == PauseState.PAUSED_NEW and _BLOCK_OWNERS_QUEUE_APART:
            return self._owns_blocks(request)
        return bool(pause_state == PauseState.UNPAUSED)

    def is_ready(self, request: Any) -> bool:
        """Whether a waiting request waits for nothing but its turn."""
        scheduler = self._scheduler
        if hasattr(scheduler, "_handle_blocked_waiting_request"):
            is_ready = scheduler._handle_blocked_waiting_request(request)
        else:
            is_blocked = scheduler._is_blocked_waiting_status(request.status)
            is_ready = not is_blocked or scheduler._try_promote_blocked_waiting_request(request)
        # From 0.27 on a preempted request waits for the tokens that were in flight.
        awaits_tokens = getattr(request, "num_stale_output_tokens", 0)
        if awaits_tokens and not request.drop_stale_output:
            return False
        return bool(is_ready) and self._adapter_fits(request)

    def _adapter_fits(self, request: Any) -> bool:
        """Whether a decode batch of all running requests and this one has adapters enough."""
        scheduler = self._scheduler
        if not scheduler.lora_config or not request.lora_request:
            return True
        running = [*scheduler.running, request]
        adapters = {other.lora_request.lora_int_id for other in running if other.lora_request}
        return len(adapters) <= int(scheduler.lora_config.max_loras)

    def has_room(self, request: Any) -> bool:
        """Whether `request` can run to its end beside the others, whatever they need."""
        others: list[Any] = self._scheduler.running
        if not self._policy.is_literal:
            others = [*others, *(r for r in self._waiting_with_blocks() if r is not request)]
        if self._policy.kv_admission == "worst_case":
            return len(others) < int(self._scheduler.max_kv_concurrent)
        manager = self._scheduler.kv_cache_manager
        # vLLM leaves it free too: a request that it then refuses would cost a step.
        spare = manager.watermark_blocks if self._scheduler.running else 0
        if self._policy.kv_admission == "shared" and self._can_share:
            return self._fits_to_the_end(request, others, spare)
        needed = sum(map(self.num_blocks_needed, (*others, request)))
        return bool(needed + spare <= self.num_usable_blocks)

    def _fits_to_the_end(self, request: Any, others: Sequence[Any], spare: int) -> bool:
        """Whether the free blocks hold what all can still need; shared blocks count once."""
        manager = self._scheduler.kv_cache_manager
        pool = manager.block_pool
        room = pool.get_num_free_blocks() - sum(map(self._num_blocks_to_come, others)) - spare
        num_missing = self._num_blocks_to_come(request) - room
        if num_missing <= 0:
            return True
        has_hits = manager.enable_caching and not request.skip_reading_prefix_cache
        if not others or not has_hits or request.num_computed_tokens > 0:
            return False
        find = manager.coordinator.find_longest_cache_hit
        hits = find(request.block_hashes, request.num_tokens - 1)[0][0]
        return bool(num_missing <= sum(block.ref_cnt > 0 for block in hits))

    def _num_blocks_to_come(self, request: Any) -> int:
        """Blocks that `request` does not have yet and may come to need."""
        (owned,) = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return max(self.num_blocks_needed(request) - len(owned), 0)

    def _waiting_with_blocks(self) -> Iterator[Any]:
        """Waiting requests that own blocks."""
        if self.holdback is None or (self._scheduler.connector is None and not self.has_streams):
            return iter(())
        waiting = chain(self.holdback.shown(), *self.holdback.waiting.values())
        return (request for request in waiting if self._owns_blocks(request))

    def _owns_blocks(self, request: Any) -> bool:
        return bool(
            request.num_computed_tokens > 0
            or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        )

    def adds_no_prefill(self, request: Any) -> bool:
        """Whether `request` comes from a node that computed its prompt."""
        node = self.decode_node
        if node is None or not node.adds_no_prefill(request):
            return False
        node.joining = request
        return True

    def queues_in_turn(self) -> Sequence[str]:
        """Names of the waiting queues in the order in which vLLM looks at them."""
        assert self.holdback is not None
        if self._policy.is_literal:
            return tuple(self.holdback.waiting)
        if self._scheduler.scheduler_config.policy == "priority" and not _BLOCK_OWNERS_QUEUE_APART:
            # Until 0.30 vLLM compares the heads of its two queues; requests order themselves.
            held = self.holdback.waiting
            heads: list[tuple[Any, str]] = [
                (held[name].peek_request(), name) for name in QUEUE_NAMES if held[name]
            ]
            return [name for _, name in sorted(heads, key=lambda head: head[0])]
        return QUEUE_NAMES

    def defers_prefills(self, throttle_prefills: bool) -> bool:
        """Whether vLLM would put prefills off while something decodes."""
        scheduler = self._scheduler
        if scheduler.prefill_capacity_bound:
            return False
        interval = getattr(scheduler, "local_prefill_interval", 1)
        return throttle_prefills or (
            interval > 1
            and scheduler.num_executed_steps + 1 - scheduler.last_prefill_step < interval
        )

    def reason_of_stop(self) -> Admission | None:
        """Nobody knows: vLLM does not say why it left a request waiting."""
        return None

    def take_back(self, output: SchedulerOutput, error: BaseException) -> None:
        """Nothing: vLLM cannot take a step back, so its engine ends with `error`."""
