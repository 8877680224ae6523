"""The Neuron rules of the scheduling model: prefill and decode never share a step.

Before the plain step, waiting requests are held back except at most one that may start its
prefill, and the decodes are hidden while any prefill is in sight; afterwards everything returns.
"""

import numpy as np

from .paging import num_blocks_for, smallest_bucket
from .scheduler_state import IntArray, NeuronRules, Pause, Rules, State, integers
from .scheduler_steps import Decision, enqueue, schedule_base, tokens_to_compute


def prefill_mask(neuron: NeuronRules, state: State, rows: IntArray, computed: IntArray) -> IntArray:
    """1 for each request that is in its prefill phase with so many tokens computed, else 0."""
    prompts = state.requests["prompt"][rows]
    if neuron.phase_test == "prompt":
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
    if neuron.usable_blocks_only:
        return max(1, (rules.num_blocks - 1) // per_request)
    bound = rules.num_blocks // per_request
    return bound if bound > 0 else rules.max_num_seqs


def kv_admits(rules: Rules, neuron: NeuronRules, state: State, row: int) -> bool:
    """Whether the blocks suffice for this request beside the running ones, to their very end."""
    if neuron.kv_admission == "worst_case":
        return len(state.running) < max_kv_concurrent(rules, neuron)
    requests = state.requests[np.append(state.running, row)]
    needs = [
        rules.blocks_ever_needed(int(request["prompt"]), int(request["max_tokens"]))
        for request in requests
    ]
    return sum(needs) <= rules.num_blocks - 1


def decode_is_due(rules: Rules, neuron: NeuronRules, state: State) -> bool:
    """Whether so many prefill steps went by that a decode which can run comes first."""
    limit = neuron.max_consecutive_prefills
    if limit is None or state.consecutive_prefills < limit:
        return False
    prefills = running_prefills(neuron, state)
    decodes = state.running[~np.isin(state.running, prefills)]
    budget = rules.token_budget
    return any(tokens_to_compute(rules, state, int(row), budget) > 0 for row in decodes)


def can_schedule(rules: Rules, neuron: NeuronRules, state: State, row: int) -> bool:
    """Whether this waiting request may start its prefill now."""
    return (
        (neuron.admit_while_paused or state.pause == Pause.UNPAUSED)
        and not decode_is_due(rules, neuron, state)
        and len(state.running) < rules.max_num_seqs
        and not len(running_prefills(neuron, state))
        and kv_admits(rules, neuron, state, row)
    )


def choose_hidden(rules: Rules, neuron: NeuronRules, state: State) -> IntArray:
    """Running requests that this step must not see, in list order."""
    prefills = running_prefills(neuron, state)
    if decode_is_due(rules, neuron, state):
        return prefills
    if len(prefills):
        return state.running[~np.isin(state.running, prefills)]
    return state.running if len(state.waiting) else integers()


def restore(neuron: NeuronRules, state: State, hidden: IntArray) -> None:
    """Bring hidden requests back into `running`."""
    state.running = np.concatenate([state.running, hidden])
    if neuron.restore_order == "admission":
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
    if not neuron.state_from_queues:
        return state.phase
    if len(running_prefills(neuron, state)):
        return "ACTIVE_PREFILL"
    return "ACTIVE_DECODE" if len(state.running) else "IDLE"


def schedule_neuron(rules: Rules, neuron: NeuronRules, state: State) -> Decision:
    """One step under the Neuron rules."""
    held, state.waiting = state.waiting, integers()
    if len(held) and can_schedule(rules, neuron, state, int(held[0])):
        state.waiting, held = held[:1], held[1:]
    hidden = choose_hidden(rules, neuron, state)
    state.running = state.running[~np.isin(state.running, hidden)]
    decision = schedule_base(rules, state)
    restore(neuron, state, hidden)
    for row in held:
        enqueue(rules, state, int(row))
    prefill = pad(rules, neuron, state, decision)
    state.consecutive_prefills = state.consecutive_prefills + 1 if prefill.any() else 0
    state.phase = next_phase(neuron, state, prefill)
    return decision


def refusal(
    rules: Rules, neuron: NeuronRules | None, prompt: int, max_tokens: int, min_tokens: int
) -> str | None:
    """Why a request of these token counts can never be served, None if it can."""
    if neuron is None or not neuron.refuse_unschedulable:
        return None
    longest = rules.max_model_len
    if prompt >= longest:
        return f"prompt of {prompt} tokens: must be below max_model_len={longest}"
    if min_tokens > min(max_tokens, longest - prompt):
        return f"min_tokens={min_tokens} is more than it may generate"
    needed, usable = rules.blocks_ever_needed(prompt, max_tokens), rules.num_blocks - 1
    if needed > usable:
        return f"needs {needed} blocks of {usable}"
    return None
