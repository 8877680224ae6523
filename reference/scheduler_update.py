"""The way back of a step of plain vLLM scheduling: sampled tokens, and requests that they end."""

from dataclasses import dataclass

import numpy as np

from .scheduler_blocks import cache_blocks, release
from .scheduler_state import NO_TOKEN, IntArray, Rules, State, Status, integers, without
from .scheduler_steps import Decision


@dataclass(frozen=True)
class Emitted:
    """New tokens of one request; `status` is its status after them."""

    row: int
    new_tokens: IntArray
    status: Status


def stop_status(rules: Rules, state: State, row: int) -> Status:
    """Status of a request after its newest token."""
    request, token = state.requests[row], int(state.tokens[row][-1])
    num_outputs = state.num_tokens(row) - request["prompt"]
    if request["eos"] != NO_TOKEN and token == request["eos"]:
        return Status.FINISHED_STOPPED
    if token in state.stop_tokens[row]:
        state.requests["stop_reason"][row] = token
        return Status.FINISHED_STOPPED
    if state.num_tokens(row) >= rules.max_model_len or num_outputs >= request["max_tokens"]:
        return Status.FINISHED_LENGTH_CAPPED
    return Status(request["status"])


def append_tokens(rules: Rules, state: State, row: int, new_tokens: IntArray) -> Emitted:
    """Append sampled tokens up to the first that ends the request; it keeps its old status."""
    status = Status(state.requests["status"][row])
    for count, token in enumerate(new_tokens, start=1):
        state.tokens[row] = np.append(state.tokens[row], token)
        after = stop_status(rules, state, row)
        if after != status:
            return Emitted(row, new_tokens[:count], after)
    return Emitted(row, new_tokens, status)


def receive(
    rules: Rules, state: State, row: int, num_tokens: int, drafts: IntArray, sampled: IntArray
) -> Emitted:
    """Account for one request's model output; the record has no tokens if nothing is delivered."""
    request = state.requests
    status = Status(request["status"][row])
    request["in_flight"][row] -= num_tokens
    stale = bool(request["stale"][row] > 0)
    if stale:
        request["stale"][row] -= num_tokens
    if not len(sampled) or (stale and request["drop"][row]):
        return Emitted(row, integers(), status)
    expected = bool(request["placeholders"][row] > 0)
    if len(drafts) and not stale:
        rejected = len(drafts) - (len(sampled) - 1)
        if request["computed"][row] > 0:
            request["computed"][row] -= rejected
        if expected:
            request["placeholders"][row] -= rejected
    emitted = append_tokens(rules, state, row, sampled)
    if stale:
        return emitted
    if expected:
        request["placeholders"][row] -= len(sampled)
    request["computed"][row] -= len(sampled) - len(emitted.new_tokens)
    if status == Status.RUNNING and (expected or rules.num_speculative_tokens):
        settled = int(request["computed"][row] - request["in_flight"][row])
        cache_blocks(rules, state, row, settled)
    return emitted


def finish(state: State, row: int, status: Status) -> None:
    """End a request: blocks free at once, even with a step in flight."""
    release(state, row)
    state.waiting = without(state.waiting, row)
    state.running = without(state.running, row)
    state.requests["status"][row] = status
    if state.ids[row] not in state.finished:  # an id can come again and end again within a step
        state.finished.append(state.ids[row])


def update_base(
    rules: Rules, state: State, decision: Decision, sampled: list[IntArray]
) -> list[Emitted]:
    """Take the model's output of a step, `sampled` parallel to `decision.rows`."""
    records = []
    counts = decision.num_tokens.tolist()
    for row, count, drafts, tokens in zip(
        decision.rows, counts, decision.drafts, sampled, strict=True
    ):
        if int(state.requests["status"][row]) > Status.PREEMPTED:
            continue  # finished while the step was in flight
        emitted = receive(rules, state, int(row), count, drafts, tokens)
        if emitted.status > Status.PREEMPTED:
            finish(state, int(row), emitted.status)
        if len(emitted.new_tokens):
            records.append(emitted)
    return records
