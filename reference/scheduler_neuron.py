"""The Neuron rules of the scheduling model: prefill and decode never share a step.

Before the plain step, waiting requests are held back except at most one that may start its
prefill, and the decodes are hidden while any prefill is in sight; afterwards everything returns.
"""

import numpy as np

from .paging import num_blocks_for, smallest_bucket
from .scheduler_blocks import longest_hit
from .scheduler_state import IntArray, NeuronRules, Pause, Rules, State, integers
from .scheduler_steps import Decision, enqueue, schedule_base, tokens_to_compute


def prefill_mask(neuron: NeuronRules, state: State, rows: IntArray, computed: IntArray) -> IntArray:
    """1 for each request that is in its prefill phase with so many tokens computed, else 0."""
    prompts = state.requests["prompt"][rows]
    if neuron.literal:
        return integers(computed < prompts)
    known = integers([state.num_tokens(row) for row in rows])
    return integers(computed < np.maximum(prompts, known - 1))


def running_prefills(neuron: NeuronRules, state: State) -> IntArray:
    """Rows in `running` that are in their prefill phase."""
    mask = prefill_mask(neuron, state, state.running, state.requests["computed"][state.running])
    return integers(state.running[mask == 1])


def max_kv_concurrent(rules: Rules, neuron: NeuronRules) -> int:
    """Requests that may run at a time if each grows to `max_model_len`."""
    per_request = num_blocks_for(rules.max_model_len, rules.block_size)
    if not neuron.literal:
        spare = int(rules.watermark * rules.num_blocks)
        return max(1, (rules.num_blocks - 1 - spare) // per_request)
    bound = rules.num_blocks // per_request
    return bound if bound > 0 else rules.max_num_seqs


def kv_admits(rules: Rules, neuron: NeuronRules, state: State, row: int) -> bool:
    """Whether the blocks suffice for this request beside the running ones, to their very end.

    "shared" counts each owned block once, whoever shares it. The published designs apart, the
    watermark stays free beside all of that, unless nothing runs.
    """
    if neuron.kv_admission == "worst_case":
        return len(state.running) < max_kv_concurrent(rules, neuron)
    requests = state.requests[np.append(state.running, row)]
    needs = integers(
        [
            rules.blocks_ever_needed(int(request["prompt"]), int(request["max_tokens"]))
            for request in requests
        ]
    )
    spare = int(rules.watermark * rules.num_blocks) if len(state.running) else 0
    if neuron.kv_admission == "reserved":
        return bool(needs.sum() + spare <= rules.num_blocks - 1)
    owned = [set(state.blocks[other].tolist()) for other in state.running]
    held: set[int] = set().union(*owned)
    growth = sum(int(need) - len(blocks) for need, blocks in zip(needs[:-1], owned, strict=True))
    shared = len(held & set(longest_hit(rules, state, row).tolist()))
    return len(held) + growth + int(needs[-1]) - shared + spare <= rules.num_blocks - 1


def decode_is_due(rules: Rules, neuron: NeuronRules, state: State) -> bool:
    """Whether decodes have waited long enough, and one of them can run."""
    if not (state.decodes_due > 0 or state.stuck):
        return False
    prefills = running_prefills(neuron, state)
    decodes = state.running[~np.isin(state.running, prefills)]
    budget = rules.token_budget
    return any(tokens_to_compute(rules, state, int(row), budget, budget) > 0 for row in decodes)


def can_schedule(rules: Rules, neuron: NeuronRules, state: State, row: int) -> bool:
    """Whether this waiting request may start its prefill now."""
    return (
        (neuron.literal or state.pause == Pause.UNPAUSED)
        and not decode_is_due(rules, neuron, state)
        and len(state.running) < rules.max_num_seqs
        and not len(running_prefills(neuron, state))
        and kv_admits(rules, neuron, state, row)
    )


def most_decodes(rules: Rules) -> int:
    """Decodes with all their drafts that one step holds."""
    return max(rules.token_budget // (1 + rules.num_speculative_tokens), 1)


def choose_hidden(rules: Rules, neuron: NeuronRules, state: State) -> IntArray:
    """Running requests that this step must not see, in list order."""
    prefills = running_prefills(neuron, state)
    due = decode_is_due(rules, neuron, state)
    is_prefill = np.isin(state.running, prefills)
    if len(prefills) and not due:
        return state.running[~is_prefill]
    if len(state.waiting):
        return state.running
    decodes = state.running[~is_prefill]
    most = most_decodes(rules)
    if neuron.literal or len(decodes) <= most:
        return prefills
    # Too many for the step: those that were served longest ago, in the order of the list.
    served = state.requests["served"][decodes]
    chosen = decodes[np.argsort(served, kind="stable")[:most]]
    state.requests["served"][chosen] = served.max() + 1
    return state.running[~np.isin(state.running, chosen)]


def restore(neuron: NeuronRules, state: State, hidden: IntArray) -> None:
    """Bring hidden requests back into `running`."""
    state.running = np.concatenate([state.running, hidden])
    if not neuron.literal:
        admitted = state.requests["admitted"][state.running]
        state.running = state.running[np.argsort(admitted, kind="stable")]


def pad(rules: Rules, neuron: NeuronRules, state: State, decision: Decision) -> IntArray:
    """Fill `decision.padded`; the prefill mask of the step.

    RuntimeError for a mixed batch, ValueError for more tokens than the largest bucket.
    """
    prefill = prefill_mask(neuron, state, decision.rows, decision.computed)
    decision.padded = integers(
        [
            smallest_bucket(int(count), rules.prefill_buckets) if is_prefill else count
            for count, is_prefill in zip(decision.num_tokens, prefill, strict=True)
        ]
    )
    state.padding += int((decision.padded - decision.num_tokens).sum())
    if 0 < prefill.sum() < len(prefill):
        raise RuntimeError(f"prefill and decode in one batch: {prefill.tolist()}")
    return prefill


def next_phase(neuron: NeuronRules, state: State, prefill: IntArray) -> str:
    """State machine after a step whose scheduled requests had this prefill mask."""
    if not len(state.waiting) and not len(state.running):
        return "IDLE"
    if len(prefill):
        return "ACTIVE_PREFILL" if prefill.any() else "ACTIVE_DECODE"
    if neuron.literal:
        return state.phase
    if len(running_prefills(neuron, state)):
        return "ACTIVE_PREFILL"
    return "ACTIVE_DECODE" if len(state.running) else "IDLE"


def take_turns(
    rules: Rules, neuron: NeuronRules, state: State, prefill: IntArray, hid_decodes: bool
) -> None:
    """Count steps of either phase; after so many prefills, decodes are due."""
    state.stuck = not len(prefill) and hid_decodes and not neuron.literal
    if prefill.any():
        state.consecutive_prefills += 1
        limit = neuron.max_consecutive_prefills
        if limit is not None and state.consecutive_prefills >= limit:
            rounds = -(-len(state.running) // most_decodes(rules))
            state.decodes_due = neuron.max_consecutive_decodes * max(rounds, 1)
    elif len(prefill):
        state.consecutive_prefills = 0
        state.decodes_due = max(state.decodes_due - 1, 0)


def is_ready(neuron: NeuronRules, state: State, row: int) -> bool:
    """Whether nothing of a waiting request is in flight that will be delivered."""
    request = state.requests[row]
    return bool(neuron.literal or request["drop"] or request["stale"] == 0)


def schedule_neuron(rules: Rules, neuron: NeuronRules, state: State) -> Decision:
    """One step under the Neuron rules."""
    held, state.waiting = state.waiting, integers()
    for row in held:
        if is_ready(neuron, state, int(row)):
            if can_schedule(rules, neuron, state, int(row)):
                state.waiting, held = integers([row]), held[held != row]
            break
    hidden = choose_hidden(rules, neuron, state)
    state.running = state.running[~np.isin(state.running, hidden)]
    state.hidden = (0, 0) if neuron.literal else (len(hidden), len(held))
    decision = schedule_base(rules, state)
    state.hidden = (0, 0)
    restore(neuron, state, hidden)
    returned = state.waiting.tolist()
    state.waiting = held
    for row in returned[::-1]:
        enqueue(rules, state, row, front=True)
    prefill = pad(rules, neuron, state, decision)
    is_paused = state.pause == Pause.PAUSED_ALL
    take_turns(rules, neuron, state, prefill, len(hidden) > 0 and not is_paused)
    state.phase = next_phase(neuron, state, prefill)
    return decision


def refusal(rules: Rules, neuron: NeuronRules | None, prompt: int, max_tokens: int) -> str | None:
    """Why a request of these token counts can never be served, None if it can."""
    if neuron is None or neuron.literal:
        return None
    longest = rules.max_model_len
    if prompt >= longest:
        return f"prompt of {prompt} tokens: must be below max_model_len={longest}"
    needed, usable = rules.blocks_ever_needed(prompt, max_tokens), rules.num_blocks - 1
    if needed > usable:
        return f"needs {needed} blocks of {usable}"
    return None
