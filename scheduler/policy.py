"""The decisions that the Neuron rules leave open, and the arithmetic that they share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..reference.paging import num_blocks_for
from .config import SchedulerConfig
from .errors import RequestError
from .phases import PhaseTest
from .request import Request


@dataclass(frozen=True)
class NeuronPolicy:
    """Whom the Neuron layer admits, and how long each phase may keep the other waiting.

    The default admits whatever can run to its end without a preemption, and lets each phase wait a
    bounded number of steps. `documented()` and `shipped()` are the published designs.
    """

    kv_admission: Literal["shared", "reserved", "worst_case"] = "shared"
    """Admit by the distinct blocks in use and what each request can still need, by the sum of what
    each request can need, or as if each grew to max_model_len. "shared": it runs the most requests
    of the three and preempts none either."""
    max_consecutive_prefills: int | None = 4
    """Prefill steps in a row after which waiting decodes have their turn; None: no bound. 4:
    decodes wait for at most four chunks, and prompts take a quarter more steps at worst."""
    max_consecutive_decodes: int = 1
    """Decode steps of such a turn, after which prefills go on. 1: each decode gets one token,
    so that first tokens wait least."""
    design: Literal["own", "documented", "shipped"] = "own"
    """Whose rules hold where the published designs have a flaw. "own": ours, without the flaws;
    "documented" and "shipped" reproduce them, to be compared."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kv_admission", ("shared", "reserved", "worst_case")),
            ("design", ("own", "documented", "shipped")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {allowed}")
        prefills, decodes = self.max_consecutive_prefills, self.max_consecutive_decodes
        if prefills is not None and (type(prefills) is not int or prefills < 1):
            raise ValueError(
                f"max_consecutive_prefills={prefills!r}: must be an integer >= 1 or None"
            )
        if type(decodes) is not int or decodes < 1:
            raise ValueError(f"max_consecutive_decodes={decodes!r}: must be an integer >= 1")
        if self.is_literal and (self.kv_admission != "worst_case" or prefills is not None):
            raise ValueError(
                f"design={self.design!r}: has kv_admission='worst_case' and "
                "max_consecutive_prefills=None"
            )

    @property
    def is_literal(self) -> bool:
        """Whether a published design is followed bug for bug."""
        return self.design != "own"

    @property
    def phase_test(self) -> PhaseTest:
        """Prefill means computed < max(prompt, known tokens - 1), or computed < prompt."""
        return "prompt" if self.is_literal else "known"

    @property
    def switches_drafts_off(self) -> bool:
        """Whether an asynchronous request near max_model_len gets no drafts any more."""
        return self.design != "documented"

    def max_kv_concurrent(
        self,
        fits: Callable[[int], int],
        num_blocks: int,
        watermark_blocks: int,
        max_num_seqs: int,
    ) -> int:
        """Requests of max_model_len that may run at once; `fits(n)` of them fit into n blocks.

        `num_blocks` includes the null block, which the published designs take for a usable one.
        They do not leave the watermark free either.
        """
        if self.is_literal:
            return fits(num_blocks) or max_num_seqs
        return max(1, fits(max(num_blocks - 1 - watermark_blocks, 0)))

    @classmethod
    def documented(cls) -> "NeuronPolicy":
        """The published design document to the letter, with which recorded traces are compared."""
        return cls("worst_case", None, design="documented")

    @classmethod
    def shipped(cls) -> "NeuronPolicy":
        """The scheduler that vLLM Neuron ships: the document, and drafts that are switched off."""
        return cls("worst_case", None, design="shipped")


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


def last_drafted_position(max_model_len: int, num_speculative_tokens: int) -> int:
    """Computed tokens beyond which a row of drafts might not fit any more, two steps in flight."""
    return max_model_len - 3 - 2 * num_speculative_tokens


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
    # Until 0.28 vLLM ended no request before min_tokens, not even at max_tokens or max_model_len.
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
        0,
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
