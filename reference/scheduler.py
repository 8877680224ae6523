"""The scheduling rules as a NumPy model: arrays in, decision out.

This is the definition that the `scheduler` package is compared with, written from the rules and
not from its code: no queues objects, no hash chains, no free-list links, only arrays that are
searched and sorted afresh in every step. It is slow on purpose.

`SchedulingModel` owns a `State` and has the operations of a scheduler. Requests are named by
their ids; tokens are integers; block ids and counts as in vLLM.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .scheduler_blocks import forget_prefixes
from .scheduler_neuron import refusal, schedule_neuron
from .scheduler_state import (
    NO_TOKEN,
    REQUEST,
    NeuronRules,
    Pause,
    Pool,
    Rules,
    State,
    Status,
    integers,
)
from .scheduler_steps import Decision, enqueue, preempt, schedule_base
from .scheduler_update import Emitted, finish, update_base

__all__ = ["Decision", "Emitted", "NeuronRules", "Pause", "Rules", "SchedulingModel", "Status"]


@dataclass(frozen=True)
class NewRequest:
    """A request as it is added; the fields mean what vLLM's `Request` and sampling options mean."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    arrival: float = 0.0
    priority: int = 0
    eos: int | None = None
    stop: Sequence[int] = ()
    min_tokens: int = 0
    salt: str | None = None
    skip_read: bool = False


class SchedulingModel:
    """A scheduler whose whole state is `state`, a bundle of arrays."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.state = State(Pool.of(rules.num_blocks))

    def copy(self) -> "SchedulingModel":
        """An independent model in the same state."""
        return copy.deepcopy(self)

    def add_request(self, request: NewRequest) -> None:
        """Append to the waiting queue; ValueError, nothing changed, if it can never be served."""
        state, prompt = self.state, integers(request.prompt)
        if not len(prompt) or request.max_tokens < 1:
            raise ValueError(f"prompt of {len(prompt)} tokens, max_tokens={request.max_tokens}")
        if state.row_of(request.request_id) is not None:
            raise ValueError(f"request_id={request.request_id!r} is live")
        counts = len(prompt), request.max_tokens
        reason = refusal(self.rules, self.rules.neuron, *counts)
        if reason is not None:
            raise ValueError(reason)
        salt = request.salt or ""
        if salt not in state.salts:
            state.salts.append(salt)
        row = np.zeros(1, dtype=REQUEST)
        row["prompt"], row["max_tokens"] = len(prompt), request.max_tokens
        row["arrival"], row["priority"] = request.arrival, request.priority
        row["eos"] = NO_TOKEN if request.eos is None else request.eos
        row["min_tokens"], row["salt"] = request.min_tokens, state.salts.index(salt)
        row["skip_read"], row["stop_reason"] = request.skip_read, NO_TOKEN
        state.requests = np.concatenate([state.requests, row])
        state.ids.append(request.request_id)
        state.tokens.append(prompt)
        state.stop_tokens.append(integers(request.stop))
        state.drafts.append(integers())
        state.blocks.append(integers())
        enqueue(self.rules, state, len(state.ids) - 1)

    def finish_requests(self, request_ids: Iterable[str], status: Status) -> list[str]:
        """End live requests from outside; the ids really ended, in the order given."""
        ended = []
        for request_id in request_ids:
            row = self.state.row_of(request_id)
            if row is not None:
                finish(self.state, row, status)
                ended.append(request_id)
        return ended

    def schedule(self) -> Decision:
        """Decide the next step and advance the computed tokens."""
        if self.rules.neuron is None:
            return schedule_base(self.rules, self.state)
        return schedule_neuron(self.rules, self.rules.neuron, self.state)

    def update(self, decision: Decision, sampled: Mapping[str, Sequence[int]]) -> list[Emitted]:
        """Take a step's model output: new tokens per request id, none while its prefill goes on."""
        tokens = [integers(sampled.get(self.state.ids[row], ())) for row in decision.rows]
        return update_base(self.rules, self.state, decision, tokens)

    def update_drafts(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Draft tokens for the next step; a request in the middle of its prefill takes none."""
        for request_id, tokens in drafts.items():
            row = self.state.row_of(request_id)
            if row is not None:
                chunk = self.state.requests["chunk"][row]
                self.state.drafts[row] = integers() if chunk else integers(tokens)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes, unless a block is owned; whether it did.

        `reset_running_requests` preempts all running requests before.
        """
        state = self.state
        if reset_running_requests:
            for row in state.running[::-1]:
                preempt(self.rules, state, int(row), drop=True)
            state.previous = integers()
        return forget_prefixes(self.rules, state)

    def set_pause_state(self, pause: Pause) -> None:
        """What the next steps may schedule."""
        self.state.pause = pause

    def get_num_unfinished_requests(self) -> int:
        """Requests that the pause state lets go on."""
        running, waiting = len(self.state.running), len(self.state.waiting)
        by_pause = {Pause.PAUSED_ALL: 0, Pause.PAUSED_NEW: running}
        return by_pause.get(self.state.pause, running + waiting)

    def has_requests(self) -> bool:
        """Whether a further step is due, if only to report finished requests."""
        return self.get_num_unfinished_requests() > 0 or len(self.state.finished) > 0
