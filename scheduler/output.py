"""What goes out of the scheduler and comes back to it; names as in vLLM 0.33."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
StepKind = Literal["prefill", "decode", "mixed", "empty"]
"""What a step computes. Neuron kinds never mix; "empty" computes nothing."""


@dataclass(slots=True)
class NewRequestData:
    """A request scheduled for the first time: all that a runner needs to know of it."""

    req_id: str
    prompt_token_ids: list[int]
    block_ids: tuple[list[int], ...]
    """One list of physical block ids per KV group (there is one group)."""
    num_computed_tokens: int
    """Tokens found in the prefix cache, before this step."""


@dataclass(slots=True)
class CachedRequestData:
    """Requests that the runner knows already, as parallel lists: running ones, then resumed ones.

    `new_block_ids` of a resumed request is its whole block table and replaces the old one;
    otherwise it is appended (None: no new block). `num_computed_tokens` counts before this step,
    `num_output_tokens` includes placeholders of tokens still in flight. `all_token_ids` holds the
    tokens of requests that the previous step did not schedule.
    """

    req_ids: list[str]
    resumed_req_ids: set[str]
    new_token_ids: list[list[int]]
    all_token_ids: dict[str, list[int]]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]


@dataclass(slots=True)
class SchedulerOutput:
    """One step: who computes how many tokens, in which blocks."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    """Real tokens per request, in scheduling order."""
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    """Draft tokens among the scheduled ones; requests without drafts are absent."""
    num_common_prefix_blocks: list[int]
    """Empty: vLLM 0.33 counts no blocks that all requests share."""
    finished_req_ids: set[str]
    """Requests that finished since the previous step; the runner forgets them."""
    preempted_req_ids: set[str]
    num_spec_tokens_to_schedule: int = 0
    skip_drafts: bool = False
    """Whether no scheduled request has use for drafts after this step."""
    step_kind: StepKind = "empty"
    num_invalid_spec_tokens: dict[str, int] | None = None
    """Drafts per request for which `update_draft_token_ids_in_output` got no token."""
    num_scheduled_tokens_padded: dict[str, int] | None = None
    """Padded tokens per request; set by the Neuron kinds."""


@dataclass(slots=True)
class ModelRunnerOutput:
    """Sampled tokens per request, an empty list while its prefill is not complete."""

    req_ids: list[str]
    sampled_token_ids: list[list[int]]


@dataclass(slots=True)
class EngineCoreOutput:
    """New tokens of one request, and why it ended if it did."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token that ended the request, if one did."""


@dataclass(slots=True)
class DraftTokenIds:
    """Draft tokens that a proposer made for the next step."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]
