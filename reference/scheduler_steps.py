"""One step of plain vLLM scheduling, on the arrays of `reference.scheduler_state`.

`schedule_base` gives tokens to running requests, preempting where blocks run out, then admits
waiting ones. The asynchronous variant (tokens still in flight are counted as placeholders) is the
same code with `rules.async_scheduling`.
"""

from dataclasses import dataclass, field

import numpy as np

from .scheduler_blocks import allocate, longest_hit, release
from .scheduler_state import NO_TOKEN, IntArray, Pause, Rules, State, Status, integers, without


@dataclass
class Decision:
    """What one step does; parallel arrays over the scheduled requests.

    rows, num_tokens, computed [num_scheduled]: request, its tokens in this step, its computed
    tokens before. new_blocks, drafts: ids of blocks it got, draft tokens it carries. outputs:
    outputs plus placeholders. admitted: status before, if it left the waiting queue, else RUNNING.
    preempted: rows thrown out. all_preempted: ids of those thrown out since the last step.
    chunk_goes_on: a running request in the middle of its prefill is scheduled. resend: rows whose
    whole text the runner no longer has. padded: as num_tokens, for the Neuron kinds.
    """

    rows: IntArray = field(default_factory=integers)
    num_tokens: IntArray = field(default_factory=integers)
    computed: IntArray = field(default_factory=integers)
    outputs: IntArray = field(default_factory=integers)
    admitted: IntArray = field(default_factory=integers)
    new_blocks: list[IntArray] = field(default_factory=list)
    drafts: list[IntArray] = field(default_factory=list)
    preempted: IntArray = field(default_factory=integers)
    resend: IntArray = field(default_factory=integers)
    finished: list[str] = field(default_factory=list)
    all_preempted: list[str] = field(default_factory=list)
    chunk_goes_on: bool = False
    padded: IntArray = field(default_factory=integers)

    @property
    def budget_used(self) -> int:
        """Tokens of the whole step."""
        return int(self.num_tokens.sum())

    def take(self, row: int, num_tokens: int, came_from: int, blocks: IntArray) -> None:
        """Append a request to the step."""
        self.rows = np.append(self.rows, row)
        self.num_tokens = np.append(self.num_tokens, num_tokens)
        self.admitted = np.append(self.admitted, int(came_from))
        self.new_blocks.append(blocks)
        self.drafts.append(integers())

    def drop(self, row: int) -> None:
        """Remove a request from the step; its tokens are free again."""
        index = int(np.flatnonzero(self.rows == row)[0])
        self.rows = np.delete(self.rows, index)
        self.num_tokens = np.delete(self.num_tokens, index)
        self.admitted = np.delete(self.admitted, index)
        del self.new_blocks[index], self.drafts[index]


def enqueue(rules: Rules, state: State, row: int, *, front: bool = False) -> None:
    """Put a request into the waiting queue: its end or front, or by priority."""
    state.waiting = np.insert(state.waiting, 0 if front else len(state.waiting), row)
    if rules.policy == "priority":
        requests = state.requests[state.waiting]
        ids = np.array([state.ids[waiting] for waiting in state.waiting])
        state.waiting = state.waiting[np.lexsort((ids, requests["arrival"], requests["priority"]))]


def preempt(rules: Rules, state: State, row: int, *, drop: bool) -> None:
    """Throw a request out of `running`: it loses its blocks and waits in front."""
    release(state, row)
    state.running = without(state.running, row)
    state.requests["status"][row] = Status.PREEMPTED
    request = state.requests
    request["computed"][row] = 0
    request["preemptions"][row] += 1
    request["drop"][row] = drop or (request["drop"][row] and request["stale"][row] > 0)
    request["stale"][row] = request["in_flight"][row]
    request["placeholders"][row] = 0
    if state.ids[row] not in state.preempted:
        state.preempted.append(state.ids[row])
    state.drafts[row] = integers()
    enqueue(rules, state, row, front=True)


def choose_victim(rules: Rules, state: State) -> int:
    """The running request to preempt: the last, or the least urgent (first of equals)."""
    if rules.policy == "fcfs":
        return int(state.running[-1])
    requests = state.requests[state.running]
    worst = max(zip(requests["priority"], requests["arrival"], strict=True))
    equals = (requests["priority"] == worst[0]) & (requests["arrival"] == worst[1])
    return int(state.running[np.argmax(equals)])


def chunk_limit(rules: Rules, state: State) -> int:
    """Most tokens of one request in a step: the threshold, unless the request is alone."""
    lone = len(state.running) + len(state.waiting) + sum(state.hidden) <= 1
    threshold = rules.long_prefill_token_threshold
    return threshold if threshold > 0 and not lone else rules.max_num_batched_tokens


def tokens_to_compute(rules: Rules, state: State, row: int, budget: int, limit: int) -> int:
    """Tokens that a running request would compute now; less than 1 = not in this step."""
    request = state.requests[row]
    computed, placeholders = int(request["computed"]), int(request["placeholders"])
    certain = computed + 2 - placeholders
    if placeholders > 0 and certain >= request["prompt"] + request["max_tokens"]:
        return 0  # the tokens in flight reach max_tokens even if all drafts are rejected
    known = state.num_tokens(row) + len(state.drafts[row]) + placeholders
    num_tokens = min(known - computed, limit, budget)
    return min(num_tokens, rules.max_model_len - computed - 1)


def take_drafts(state: State, decision: Decision, row: int, num_tokens: int) -> None:
    """Tokens beyond the known and the placeholders are drafts; unscheduled drafts are forgotten."""
    request = state.requests[row]
    last = int(request["computed"]) + num_tokens
    num_drafts = last - state.num_tokens(row) - int(request["placeholders"])
    decision.drafts[-1] = state.drafts[row][: max(num_drafts, 0)]
    state.drafts[row] = integers()


def schedule_running(
    rules: Rules, state: State, decision: Decision, budget: int, limit: int
) -> None:
    """Give every running request its tokens in list order, as far as `budget` goes."""
    index = 0
    while index < len(state.running) and decision.budget_used < budget:
        row = int(state.running[index])
        left = budget - decision.budget_used
        num_tokens = tokens_to_compute(rules, state, row, left, limit)
        if num_tokens < 1:
            index += 1
            continue
        blocks = allocate(rules, state, row, num_tokens, integers(), must_fit=False)
        while blocks is None:
            victim = choose_victim(rules, state)
            if victim in decision.rows:
                decision.drop(victim)
            if victim in state.running[:index]:
                index -= 1
            preempt(rules, state, victim, drop=False)
            decision.preempted = np.append(decision.preempted, victim)
            if victim == row:
                break
            blocks = allocate(rules, state, row, num_tokens, integers(), must_fit=False)
        if blocks is None:
            continue  # it preempted itself; the next one has its place in the list
        decision.chunk_goes_on |= bool(state.requests["chunk"][row])
        decision.take(row, num_tokens, Status.RUNNING, blocks)
        take_drafts(state, decision, row, num_tokens)
        index += 1


def padding_drafts(rules: Rules, state: State, decision: Decision, row: int, hit: int) -> int:
    """Drafts that make a request with one token to compute as long as the decodes beside it."""
    drafts = rules.num_speculative_tokens
    beside_decodes = len(decision.rows) - int((decision.admitted != int(Status.RUNNING)).sum()) > 0
    pads = (
        rules.neuron is None
        and state.num_tokens(row) - hit == 1
        and not decision.chunk_goes_on
        and (beside_decodes or hit > 0)
        and hit + drafts + 2 <= rules.max_model_len
    )
    return drafts if pads else 0


def admit_waiting(rules: Rules, state: State, decision: Decision, budget: int, limit: int) -> None:
    """Admit waiting requests from the head until one does not fit.

    Those that have stale tokens in flight which will be delivered are passed over.
    """
    for row in state.waiting.tolist():
        request = state.requests[row]
        if request["stale"] > 0 and not request["drop"]:
            continue
        left = budget - decision.budget_used
        if left <= 0 or len(state.running) == rules.max_num_seqs:
            return
        hits = longest_hit(rules, state, row)
        hit_tokens = len(hits) * rules.block_size
        drafts = padding_drafts(rules, state, decision, row, hit_tokens)
        if drafts and 1 + drafts > left:
            return
        num_tokens = min(state.num_tokens(row) - hit_tokens + drafts, limit)
        if num_tokens > left and not rules.enable_chunked_prefill:
            return
        num_tokens = min(num_tokens, left)
        must_fit = rules.scheduler_reserve_full_isl
        if allocate(rules, state, row, num_tokens, hits, must_fit) is None:
            return
        decision.take(row, num_tokens, int(state.requests["status"][row]), state.blocks[row])
        decision.drafts[-1] = integers([NO_TOKEN] * drafts)
        state.waiting = without(state.waiting, row)
        state.running = np.append(state.running, row)
        state.admissions += 1
        state.requests["admitted"][row] = state.admissions
        state.requests["status"][row] = Status.RUNNING
        state.requests["computed"][row] = hit_tokens


def schedule_base(rules: Rules, state: State) -> Decision:
    """One step of vLLM's scheduler over the queues as they stand."""
    decision = Decision()
    budget = 0 if state.pause == Pause.PAUSED_ALL else rules.token_budget
    limit = chunk_limit(rules, state)
    schedule_running(rules, state, decision, budget, limit)
    if not len(decision.preempted) and state.pause == Pause.UNPAUSED:
        admit_waiting(rules, state, decision, budget, limit)
    rows = decision.rows
    texts = integers([state.num_tokens(row) for row in rows])
    requests = state.requests[rows]
    decision.computed = requests["computed"].copy()
    decision.outputs = texts - requests["prompt"] + requests["placeholders"]
    decision.resend = rows[
        (decision.admitted != int(Status.WAITING)) & ~np.isin(rows, state.previous)
    ]
    decision.finished, state.finished = state.finished, []
    decision.all_preempted, state.preempted = state.preempted, []
    state.previous = rows.copy()
    state.requests["computed"][rows] += decision.num_tokens
    state.requests["in_flight"][rows] += decision.num_tokens
    known = texts + requests["placeholders"]
    state.requests["chunk"][rows] = state.requests["computed"][rows] < known
    if rules.async_scheduling:
        expect_tokens(rules, state, decision)
    return decision


def expect_tokens(rules: Rules, state: State, decision: Decision) -> None:
    """Placeholders for the tokens and drafts that are now in flight."""
    for row, drafts in zip(decision.rows, decision.drafts, strict=True):
        if not state.requests["chunk"][row]:
            state.requests["placeholders"][row] += 1 + len(drafts)
            num_drafts = rules.num_speculative_tokens
            if rules.neuron is not None and rules.neuron.design != "documented":
                last = rules.max_model_len - 3 - 2 * num_drafts
                state.requests["no_drafts"][row] |= state.requests["computed"][row] > last
            none = state.requests["no_drafts"][row]
            state.drafts[row] = integers([] if none else [NO_TOKEN] * num_drafts)
