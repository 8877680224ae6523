"""A request and its progress."""

from collections.abc import Iterable, Sequence
from enum import IntEnum

from .errors import RequestError
from .output import FinishReason
from .prefix_digests import PrefixDigests


class RequestStatus(IntEnum):
    """Where a request stands; everything above PREEMPTED is finished."""

    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_IGNORED = 7
    FINISHED_ERROR = 8

    @property
    def is_finished(self) -> bool:
        """Whether the request is over."""
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason that the client is told; None while the request lives."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_IGNORED: "length",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """A prompt to continue by up to `max_tokens` tokens, and how far it has come.

    Finishes on `eos_token_id` or one of `stop_token_ids` once `min_tokens` are out, on
    `max_tokens`, or when it is as long as the model allows. `cache_salt` separates its prefix
    cache from that of other salts; `skip_reading_prefix_cache` computes everything anew but still
    fills the cache. Smaller `priority`, then earlier `arrival_time`, goes first under the
    priority policy. Values are checked by `add_request` (here, RequestError: what is
    no list of tokens); a list given as prompt is not copied and must not change.

    Counts are in tokens; `num_computed_tokens` is advanced when a step is scheduled, not when its
    output arrives.
    """

    __slots__ = (
        "arrival_time",
        "async_tokens_to_discard",
        "block_ids",
        "blocks_due_at",
        "cache_salt",
        "end_token_ids",
        "eos_token_id",
        "is_prefill_chunk",
        "max_num_tokens",
        "max_tokens",
        "min_tokens",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_output_placeholders",
        "num_output_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "output_token_ids",
        "prefix",
        "priority",
        "prompt_token_ids",
        "request_id",
        "sequence_number",
        "skip_reading_prefix_cache",
        "spec_token_ids",
        "status",
        "stop_reason",
        "stop_token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        *,
        arrival_time: float = 0.0,
        priority: int = 0,
        eos_token_id: int | None = None,
        stop_token_ids: Iterable[int] = (),
        min_tokens: int = 0,
        cache_salt: str | None = None,
        skip_reading_prefix_cache: bool = False,
    ) -> None:
        self.request_id = request_id
        for name, tokens in (
            ("prompt_token_ids", prompt_token_ids),
            ("stop_token_ids", stop_token_ids),
        ):
            if not isinstance(tokens, Iterable):
                raise RequestError(request_id, f"{name}={tokens!r}: must be a list of token ids")
        self.prompt_token_ids = (
            prompt_token_ids if isinstance(prompt_token_ids, list) else list(prompt_token_ids)
        )
        self.max_tokens = max_tokens
        self.arrival_time = arrival_time
        self.priority = priority
        self.eos_token_id = eos_token_id
        self.stop_token_ids = frozenset(stop_token_ids)
        self.end_token_ids = self.stop_token_ids | (
            frozenset() if eos_token_id is None else {eos_token_id}
        )
        """All tokens that may end it."""
        self.min_tokens = min_tokens
        self.cache_salt = cache_salt
        self.skip_reading_prefix_cache = skip_reading_prefix_cache

        self.sequence_number = 0
        """Its rank in the order of `add_request`."""
        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        self.output_token_ids: list[int] = []
        self.num_prompt_tokens = len(self.prompt_token_ids)
        # Kept as plain integers: the scheduler reads them for every request of every step.
        self.num_tokens = self.num_prompt_tokens
        self.max_num_tokens = 0
        """Known tokens at which it may be over; `add_request` tells."""
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.spec_token_ids: list[int] = []
        self.is_prefill_chunk = False
        """Whether the latest scheduled step leaves known tokens uncomputed: nothing is sampled."""

        # Async scheduling: sampled tokens that are scheduled but not yet known.
        self.num_output_placeholders = 0
        self.async_tokens_to_discard = 0

        # KV cache, written by KVCacheManager alone.
        self.block_ids: list[int] = []
        self.prefix: PrefixDigests | None = None
        self.num_cached_blocks = 0
        self.blocks_due_at = 0

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, "
            f"computed={self.num_computed_tokens}/{self.num_tokens}, "
            f"output={self.num_output_tokens}/{self.max_tokens})"
        )

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and outputs, as a new list: the request itself does not keep its prompt twice."""
        return self.prompt_token_ids + self.output_token_ids

    def last_token_ids(self, count: int) -> list[int]:
        """The latest `count` known tokens."""
        num_prompt = count - self.num_output_tokens
        if num_prompt <= 0:
            return self.output_token_ids[-count:]
        return self.prompt_token_ids[-num_prompt:] + self.output_token_ids

    def truncate(self, num_tokens: int) -> None:
        """Drop all but the first `num_tokens` known tokens; the prompt stays."""
        self.num_output_tokens = num_tokens - self.num_prompt_tokens
        self.num_tokens = num_tokens
        del self.output_token_ids[self.num_output_tokens :]

    def is_finished(self) -> bool:
        """Whether the request is over."""
        return self.status.is_finished
