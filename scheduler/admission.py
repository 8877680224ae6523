"""Why a waiting request waits."""

from enum import Enum


class Admission(Enum):
    """Answer to "may this request start now?"; true only when it may."""

    ADMITTED = "admitted"
    PAUSED = "paused"
    """The scheduler is paused."""
    PREEMPTION = "preemption"
    """This step had to preempt a running request."""
    TOKEN_BUDGET = "token_budget"
    """The step's tokens are spent, or too few are left for a prompt that may not be chunked."""
    MAX_NUM_SEQS = "max_num_seqs"
    """As many requests run as are allowed."""
    KV_BLOCKS = "kv_blocks"
    """Too few blocks are free."""
    THROTTLED = "throttled"
    """The caller asked to put prefills off."""
    BEHIND = "behind"
    """A request in front of it waits."""
    DECODE_TURN = "decode_turn"
    """Neuron: decodes have this step for themselves."""
    PREFILL_RUNNING = "prefill_running"
    """Neuron: another prompt is being prefilled."""
    PREFILL_BATCH = "prefill_batch"
    """Neuron: this step already starts a prefill."""
    BLOCKED = "blocked"
    """vLLM: it waits for a grammar, remote KV, an adapter or more input."""
    NOT_SCHEDULED = "not_scheduled"
    """No step has looked at it yet. vLLM: it was admitted, but the base could not schedule it."""

    # Members are counted in every step; Enum's own hash is a Python function.
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return self is Admission.ADMITTED
