"""A request and its progress."""

from collections.abc import Iterable, Sequence
from enum import IntEnum

from .errors import RequestError
from .output import FinishReason


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

    Finishes on `eos_token_id` or one of `stop_token_ids`, on `max_tokens`, or when it is as long
    as the model allows; a sampler masks the tokens that end it until `min_tokens` are out.
    `cache_salt` separates its prefix cache from that of other salts; `skip_reading_prefix_cache`
    computes everything anew but still fills the cache. Smaller `priority`, then earlier
    `arrival_time`, goes first under the priority policy. Values are checked by `add_request`
    (here, RequestError: what is no list of tokens); a list given as prompt is not copied and must
    not change.

    Counts are in tokens; `num_computed_tokens` is advanced when a step is scheduled, not when its
    output arrives.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "block_ids",
        "blocks_due_at",
        "cache_salt",
        "drafts_are_off",
        "drop_stale_output",
        "end_token_ids",
        "eos_token_id",
        "is_prefill_chunk",
        "max_num_tokens",
        "max_tokens",
        "min_tokens",
        "num_blocks_needed",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_output_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_stale_output_tokens",
        "num_tokens",
        "output_token_ids",
        "priority",
        "prompt_token_ids",
        "request_id",
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

        self.num_in_flight_tokens = 0
        """Tokens of steps that have not come back."""
        self.num_stale_output_tokens = 0
        """Those of them that were scheduled before the latest preemption."""
        self.drop_stale_output = False
        """Whether what was sampled by them is dropped, or still delivered."""
        self.num_output_placeholders = 0
        """Async scheduling: sampled tokens that are scheduled but not yet known."""
        self.drafts_are_off = False
        """Neuron, async: so near to max_model_len that it is drafted for no more."""

        # KV cache, written by KVCacheManager alone.
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_cached_blocks = 0
        self.num_blocks_needed = 0
        """Most blocks that it can own; `add_request` tells."""
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

    def token_ids_from(self, begin: int) -> list[int]:
        """Known tokens from position `begin` on."""
        num_prompt = self.num_prompt_tokens
        if begin >= num_prompt:
            return self.output_token_ids[begin - num_prompt :]
        return self.prompt_token_ids[begin:] + self.output_token_ids

    def is_finished(self) -> bool:
        """Whether the request is over."""
        return self.status.is_finished
