"""Limits and switches of a scheduler, checked when they are given."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum

from ..reference.paging import check_buckets, default_buckets

POLICIES = ("fcfs", "priority")


def _require(name: str, value: object, allowed: str, valid: bool) -> None:
    if not valid:
        raise ValueError(f"{name}={value!r}: must be {allowed}")


def _require_int(name: str, value: object, smallest: int, largest: int | None = None) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    allowed = f"an integer >= {smallest}" + ("" if largest is None else f" and <= {largest}")
    _require(
        name,
        value,
        allowed,
        is_int
        and isinstance(value, int)
        and value >= smallest
        and (largest is None or value <= largest),
    )


@dataclass(frozen=True)
class SchedulerConfig:
    """Configuration of every scheduler kind. Counts are requests, tokens or blocks.

    Names and defaults are vLLM's unless a field says otherwise. Raises ValueError naming the
    argument, its value and what is allowed.
    """

    max_num_seqs: int
    """Requests that may run at once; the largest decode batch that is compiled."""
    max_num_batched_tokens: int
    """Tokens of one step; the largest prefill graph that is compiled."""
    max_model_len: int
    """Longest sequence, prompt and output together."""
    block_size: int
    """Tokens of one block of the KV cache."""
    num_blocks: int
    """Blocks of the cache, the null block included: one less can be used."""
    _: KW_ONLY
    enable_prefix_caching: bool = True
    """Share the blocks of equal prefixes. On: it changes no result."""
    enable_chunked_prefill: bool = True
    """Cut prompts that exceed the budget. On: without it a prompt must fit into one step."""
    long_prefill_token_threshold: int = 0
    """Cut the prompts of requests that are not alone into chunks of so many tokens. 0: no limit
    but the budget, since on Neuron a chunk never shares its step."""
    policy: str = "fcfs"
    """Order of admission: "fcfs", as requests came, or "priority" and then arrival time."""
    scheduler_reserve_full_isl: bool = True
    """Admit only whom the free blocks hold with the whole prompt. On: a prompt that is half
    computed when blocks run out is computed again."""
    watermark: float = 0.0
    """Share of blocks that an admission leaves free for those that run. 0: the Neuron policies
    reserve what requests can still need."""
    max_num_scheduled_tokens: int | None = None
    """Token budget of a step where it is smaller than the graphs. None: max_num_batched_tokens."""
    num_speculative_tokens: int = 0
    """Drafts that a request may carry. 0: no speculative decoding."""
    num_lookahead_tokens: int = 0
    """Slots that are allocated beyond the scheduled tokens: the number of drafts where the drafter
    writes the cache too (eagle, a draft model). 0: it does not."""
    long_prefill_token_threshold_adaptive: bool = False
    """Raise the threshold to the step's share of each request. Off, as in vLLM."""
    max_num_active_seqs: int | None = None
    """Bound on admission below max_num_seqs. None: max_num_seqs."""
    prefill_schedule_interval: int = 1
    """Steps of which one may prefill while something decodes. 1: every one; the Neuron policy has
    its own bounds."""
    num_speculative_tokens_per_batch_size: Sequence[tuple[int, int, int]] = ()
    """(first, last, drafts) by the number of scheduled requests. Empty: always
    num_speculative_tokens."""
    max_num_new_slots_for_drafting: int = 0
    """Tokens of max_num_batched_tokens that the drafter takes for each request. 0: none."""
    can_skip_drafts: bool = False
    """Let a step tell that nobody needs drafts. Off: the drafter always runs."""
    requires_kv_delivery: bool = False
    """Drop what is in flight when a request is preempted. Off: a token that was sampled counts,
    unless another node must have received its KV."""
    repair_vllm_faults: bool = False
    """Depart from vLLM where it goes wrong (docs/decisions.md). Off, so that decisions are vLLM's;
    the Neuron kinds always do, unless their policy is a published one."""
    num_batched_tokens_buckets: Sequence[int] | None = None
    """Padded sizes of prefill steps, ascending, the last one min(max_num_batched_tokens,
    max_model_len); read by the Neuron kinds. None: powers of two from 128 up to it. Every size is a
    graph to compile and to keep loaded."""
    num_seqs_buckets: Sequence[int] | None = None
    """Padded sizes of decode batches, ascending, the last one max_num_seqs; read by the Neuron
    kinds. None: powers of two from 1 up to it."""
    prefill_buckets: tuple[int, ...] = field(init=False)
    """Padded token counts of a prefill step, the last one min(max_num_batched_tokens,
    max_model_len)."""
    decode_buckets: tuple[int, ...] = field(init=False)
    """Padded batch sizes of a decode step, the last one max_num_seqs."""

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_policy()
        largest_chunk = min(self.max_num_batched_tokens, self.max_model_len)
        prefill, decode = self.num_batched_tokens_buckets, self.num_seqs_buckets
        # A frozen dataclass sets its derived fields once, through object.__setattr__.
        object.__setattr__(
            self,
            "prefill_buckets",
            tuple(
                default_buckets(largest_chunk)
                if prefill is None
                else check_buckets("num_batched_tokens_buckets", prefill, largest_chunk)
            ),
        )
        object.__setattr__(
            self,
            "decode_buckets",
            tuple(
                default_buckets(self.max_num_seqs, smallest=1)
                if decode is None
                else check_buckets("num_seqs_buckets", decode, self.max_num_seqs)
            ),
        )

    @property
    def step_token_budget(self) -> int:
        """Tokens that one step may schedule."""
        if self.max_num_scheduled_tokens is None:
            return self.max_num_batched_tokens
        return self.max_num_scheduled_tokens

    def _check_counts(self) -> None:
        for name in (
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "scheduler_reserve_full_isl",
            "long_prefill_token_threshold_adaptive",
            "can_skip_drafts",
            "requires_kv_delivery",
            "repair_vllm_faults",
        ):
            value = getattr(self, name)
            _require(name, value, "True or False", isinstance(value, bool))
        for name in ("max_num_seqs", "max_model_len", "block_size"):
            _require_int(name, getattr(self, name), 1)
        # Block 0 is the null block, so one block alone holds nothing.
        _require_int("num_blocks", self.num_blocks, 2)
        # Fewer tokens than requests could never decode a full batch.
        _require_int("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs)
        for name in (
            "long_prefill_token_threshold",
            "num_speculative_tokens",
            "num_lookahead_tokens",
            "max_num_new_slots_for_drafting",
        ):
            _require_int(name, getattr(self, name), 0)
        _require_int("prefill_schedule_interval", self.prefill_schedule_interval, 1)
        if self.max_num_active_seqs is not None:
            _require_int("max_num_active_seqs", self.max_num_active_seqs, 1, self.max_num_seqs)
        self._check_speculation()
        if self.max_num_scheduled_tokens is not None:
            _require_int(
                "max_num_scheduled_tokens",
                self.max_num_scheduled_tokens,
                1,
                self.max_num_batched_tokens,
            )
        if not self.enable_chunked_prefill:
            _require(
                "long_prefill_token_threshold",
                self.long_prefill_token_threshold,
                "0 without chunked prefill: it cuts prompts into chunks",
                self.long_prefill_token_threshold == 0,
            )
            # A prompt longer than the budget would wait for ever.
            for name in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
                if getattr(self, name) is not None:
                    _require(
                        name,
                        getattr(self, name),
                        f">= max_model_len={self.max_model_len} without chunked prefill",
                        getattr(self, name) >= self.max_model_len,
                    )

    def _check_speculation(self) -> None:
        num_drafts, threshold = self.num_speculative_tokens, self.long_prefill_token_threshold
        _require(
            "long_prefill_token_threshold",
            threshold,
            f"0 or > num_speculative_tokens={num_drafts}",
            threshold == 0 or threshold > num_drafts,
        )
        reach = 0
        for first, last, count in self.num_speculative_tokens_per_batch_size:
            _require(
                "num_speculative_tokens_per_batch_size",
                self.num_speculative_tokens_per_batch_size,
                "(first, last, drafts) in ascending order, the first from 1",
                reach < first <= last and count >= 0 and (reach > 0 or first == 1),
            )
            reach = last

    def num_drafts_for(self, num_scheduled: int) -> int:
        """Drafts that a step of so many requests asks for: of the last range that began."""
        counts = [
            min(count, self.num_speculative_tokens)
            for first, _, count in self.num_speculative_tokens_per_batch_size
            if first <= num_scheduled
        ]
        return counts[-1] if counts else self.num_speculative_tokens

    def _check_policy(self) -> None:
        _require("policy", self.policy, f"one of {POLICIES}", self.policy in POLICIES)
        is_share = type(self.watermark) in (int, float) and 0.0 <= self.watermark <= 1.0
        _require("watermark", self.watermark, "within 0..1", is_share)


class PauseState(IntEnum):
    """How much of the work a paused scheduler still takes on; the values are vLLM's."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    """Running requests go on, nothing is admitted."""
    PAUSED_ALL = 2
    """Nothing is scheduled."""
