"""The decisions that the Neuron rules leave open, and the arithmetic that they share."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

from ..reference.paging import num_blocks_for
from .config import SchedulerConfig
from .errors import RequestError
from .request import Request

PhaseTest = Literal["known", "prompt"]


@dataclass(frozen=True)
class NeuronPolicy:
    """What the Neuron layer does where its published design has a flaw or offers a choice.

    The defaults never deadlock, livelock, preempt a decode or mix phases. `documented()` is the
    published design to the letter.
    """

    usable_blocks_only: bool = True
    """Bound the running requests by the blocks that can be owned (without the null block), at
    least one, and let decodes run after a prefill step that could not schedule anything. Otherwise
    all blocks count, and a pool too small for one longest request means no bound at all."""
    restore_order: Literal["admission", "new_first"] = "admission"
    """Order of `running` after a step: of admission, or scheduled requests before hidden ones."""
    admit_while_paused: bool = False
    """Whether a waiting request hides the decodes although the base will not admit it."""
    hold_back_skipped_waiting: bool = True
    """Whether requests that wait outside `waiting` (vLLM: for a grammar, remote KV or the next
    chunk of a stream) are held back like the others."""
    restore_on_error: bool = True
    """Whether hidden requests come back when the base scheduler raises."""
    phase_test: PhaseTest = "known"
    """Prefill means computed < max(prompt, known tokens - 1), or computed < prompt."""
    state_from_queues: bool = True
    """Whether a step without tokens renews `state`, and empty queues mean IDLE at once."""
    refuse_unschedulable: bool = True
    """Whether `add_request` refuses a request that could never finish."""
    max_consecutive_prefills: int | None = None
    """Prefill steps in a row after which decodes get one step; None: prefills always win."""
    kv_admission: Literal["worst_case", "reserved"] = "worst_case"
    """Admit as if each request grew to max_model_len, or by the sum of what each can need."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("restore_order", ("admission", "new_first")),
            ("phase_test", ("known", "prompt")),
            ("kv_admission", ("worst_case", "reserved")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {allowed}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise ValueError(f"{field.name}={value!r}: must be True or False")
        limit = self.max_consecutive_prefills
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(f"max_consecutive_prefills={limit!r}: must be an integer >= 1 or None")

    @classmethod
    def documented(cls) -> "NeuronPolicy":
        """The published design bug for bug, with which recorded traces are compared."""
        return cls(
            usable_blocks_only=False,
            restore_order="new_first",
            admit_while_paused=True,
            hold_back_skipped_waiting=False,
            restore_on_error=False,
            phase_test="prompt",
            state_from_queues=False,
            refuse_unschedulable=False,
        )


def is_prefill(
    num_computed_tokens: int,
    num_prompt_tokens: int,
    num_tokens: int,
    phase_test: PhaseTest = "known",
) -> bool:
    """Whether a request that has computed so many of its known tokens is in its prefill phase.

    `num_tokens` counts prompt and outputs without drafts and placeholders. A resumed request has
    outputs to recompute, which is prefill work too: "known" sees that, "prompt" does not.
    """
    if phase_test == "prompt":
        return num_computed_tokens < num_prompt_tokens
    return num_computed_tokens < max(num_prompt_tokens, num_tokens - 1)


def prefills_of(requests: Iterable[Request], phase_test: PhaseTest) -> list[Request]:
    """The requests that are in their prefill phase; `is_prefill` inlined, it runs every step."""
    if phase_test == "prompt":
        return [r for r in requests if r.num_computed_tokens < r.num_prompt_tokens]
    return [
        r
        for r in requests
        if r.num_computed_tokens < r.num_prompt_tokens or r.num_computed_tokens < r.num_tokens - 1
    ]


def num_tokens_to_hold(
    num_prompt_tokens: int,
    max_tokens: int,
    max_model_len: int,
    num_draft_tokens: int,
    num_lookahead_tokens: int,
) -> int:
    """Most cache rows that blocks are ever allocated for, over the life of a request.

    The last sampled token is never written, `num_draft_tokens` (drafts that may be scheduled
    before the outcome of earlier ones is known) may reach beyond max_tokens, and the base
    allocates `num_lookahead_tokens` on top, all of it within max_model_len.
    """
    num_scheduled = min(num_prompt_tokens + max_tokens - 1 + num_draft_tokens, max_model_len - 1)
    return min(num_scheduled + num_lookahead_tokens, max_model_len)


def draft_tokens_in_flight(num_speculative_tokens: int, asynchronous: bool) -> int:
    """Drafts whose outcome is unknown when a step is scheduled: of one step, or of two."""
    return num_speculative_tokens * (2 if asynchronous else 1)


def unschedulable_reason(
    num_prompt_tokens: int,
    max_tokens: int,
    min_tokens: int,
    max_model_len: int,
    num_blocks_needed: int,
    num_usable_blocks: int,
) -> str | None:
    """Why a request could never finish, even alone; None when it can."""
    if num_prompt_tokens >= max_model_len:
        return (
            f"prompt of {num_prompt_tokens} tokens must be shorter than "
            f"max_model_len={max_model_len}"
        )
    # vLLM 0.24 does not end a request before min_tokens, not even at max_tokens or max_model_len.
    longest_output = min(max_tokens, max_model_len - num_prompt_tokens)
    if min_tokens > max(longest_output, 0):  # a negative max_tokens is refused under its own name
        return (
            f"min_tokens={min_tokens} must be at most {longest_output}: max_tokens={max_tokens}, "
            f"and max_model_len={max_model_len} leaves {max_model_len - num_prompt_tokens}"
        )
    if num_blocks_needed > num_usable_blocks:
        return (
            f"prompt of {num_prompt_tokens} tokens with max_tokens={max_tokens} needs "
            f"{num_blocks_needed} KV blocks, the cache has {num_usable_blocks}"
        )
    return None


def check_schedulable(request: Request, config: SchedulerConfig, asynchronous: bool) -> None:
    """Raise RequestError when `request` could never finish under `config`, even alone."""
    reason = unschedulable_reason(
        request.num_prompt_tokens,
        request.max_tokens,
        request.min_tokens,
        config.max_model_len,
        num_blocks_needed(request, config, asynchronous),
        config.num_blocks - 1,
    )
    if reason is not None:
        raise RequestError(request.request_id, reason)


def num_blocks_needed(request: Request, config: SchedulerConfig, asynchronous: bool) -> int:
    """Most blocks that `request` can own at a time under `config`."""
    num_tokens = num_tokens_to_hold(
        request.num_prompt_tokens,
        request.max_tokens,
        config.max_model_len,
        draft_tokens_in_flight(config.num_speculative_tokens, asynchronous),
        config.num_lookahead_tokens,
    )
    return num_blocks_for(num_tokens, config.block_size)
