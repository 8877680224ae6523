"""Limits and switches of a scheduler, checked when they are given."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

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

    `num_blocks` includes the null block, as in vLLM, so `num_blocks - 1` blocks are usable.
    `num_speculative_tokens` is the number of drafts that a request may carry;
    `num_lookahead_tokens` is what block allocation adds for them (k for eagle or a draft model).
    `max_num_scheduled_tokens` is the token budget of a step (None: `max_num_batched_tokens`).
    `watermark` is the share of blocks that an admission must leave free. The bucket lists are read
    by the Neuron kinds only; None means the default list. Raises ValueError naming the argument,
    its value and what is allowed.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    _: KW_ONLY
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    max_num_scheduled_tokens: int | None = None
    num_speculative_tokens: int = 0
    num_lookahead_tokens: int = 0
    num_batched_tokens_buckets: Sequence[int] | None = None
    num_seqs_buckets: Sequence[int] | None = None
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
        ):
            _require_int(name, getattr(self, name), 0)
        if self.max_num_scheduled_tokens is not None:
            _require_int(
                "max_num_scheduled_tokens",
                self.max_num_scheduled_tokens,
                1,
                self.max_num_batched_tokens,
            )
        if not self.enable_chunked_prefill:
            # A prompt longer than the budget would wait for ever.
            for name in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
                if getattr(self, name) is not None:
                    _require(
                        name,
                        getattr(self, name),
                        f">= max_model_len={self.max_model_len} without chunked prefill",
                        getattr(self, name) >= self.max_model_len,
                    )

    def _check_policy(self) -> None:
        _require("policy", self.policy, f"one of {POLICIES}", self.policy in POLICIES)
        is_share = type(self.watermark) in (int, float) and 0.0 <= self.watermark <= 1.0
        _require("watermark", self.watermark, "within 0..1", is_share)
