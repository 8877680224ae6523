"""Traces of the scheduling model: JSON events in, the same events with its observations out.

The format is that of the golden traces in tests/data: `["add", {...}]` (a third element
"RequestError" says that it is refused), `["abort", ids, done]`, `["reset", running, result,
queues]`, `["pause", state]`, `["drafts", [[id, tokens], ...]]`, `["schedule", step, observation]`,
`["update", step, sampled, observation]`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from .scheduler import Decision, Emitted, NewRequest, Pause, Rules, SchedulingModel, Status
from .scheduler_state import NO_TOKEN, IntArray, NeuronRules

Event = list[Any]

EOS_OF_TRACES = 2
"""End-of-sequence token of a request whose event names none."""

FINISH_REASONS = {
    Status.FINISHED_STOPPED: "stop",
    Status.FINISHED_LENGTH_CAPPED: "length",
    Status.FINISHED_ABORTED: "abort",
}


UNKNOWN_OPTIONS = {
    "long_prefill_token_threshold_adaptive": False,
    "max_num_active_seqs": None,
    "prefill_schedule_interval": 1,
    "num_speculative_tokens_per_batch_size": (),
    "max_num_new_slots_for_drafting": 0,
    "can_skip_drafts": False,
    "requires_kv_delivery": False,
    "repair_vllm_faults": False,
}
"""Options of SchedulerConfig whose rules the model does not have, and the value that is off."""


def check_options(config: Mapping[str, Any]) -> None:
    """ValueError for an option that the model does not have."""
    for name, off in UNKNOWN_OPTIONS.items():
        value = config.get(name, off)
        if value != off and not (off == () and not value):
            raise ValueError(f"{name}={value!r}: the model has no rules for it, only {off!r}")


def rules_of_trace(kind: str, config: Mapping[str, Any], neuron: NeuronRules | None) -> Rules:
    """Rules of a trace's `kind` (base, async, neuron, neuron_async) and `config`.

    ValueError for an option that the model does not have.
    """
    check_options(config)
    known = {item.name for item in fields(Rules)}
    numbers = {name: value for name, value in config.items() if name in known}
    buckets = numbers.pop("num_batched_tokens_buckets", None)
    return Rules(
        **numbers,
        num_batched_tokens_buckets=None if buckets is None else tuple(buckets),
        async_scheduling=kind.endswith("async"),
        neuron=neuron if kind.startswith("neuron") else None,
    )


class ModelTrace:
    """A model that consumes events; the same calls as a real scheduler behind an engine loop.

    An error of `schedule` is observed as `{"error": type}` and ends the trace.
    """

    def __init__(self, rules: Rules) -> None:
        self.model = SchedulingModel(rules)
        self.in_flight: dict[int, Decision] = {}
        self.unreported: list[int] = []

    def apply(self, event: Event) -> Event:
        """Perform the event's input part and return the event with this model's observations."""
        kind, arguments = event[0], event[1:]
        return [kind, *getattr(self, f"_{kind}")(*arguments)]

    def _add(self, given: dict[str, Any], *_: object) -> Event:
        keywords = {name: value for name, value in given.items() if name != "id"}
        keywords.setdefault("eos", EOS_OF_TRACES)
        try:
            self.model.add_request(NewRequest(given["id"], **keywords))
        except ValueError:
            return [given, "RequestError"]
        self.unreported.append(len(self.model.state.ids) - 1)
        return [given]

    def _abort(self, ids: list[str], *_: object) -> Event:
        return [ids, self.model.finish_requests(ids, Status.FINISHED_ABORTED)]

    def _reset(self, running: int, *_: object) -> Event:
        return [running, self.model.reset_prefix_cache(bool(running)), self._queues()]

    def _pause(self, pause: int) -> Event:
        self.model.set_pause_state(Pause(pause))
        return [pause]

    def _drafts(self, drafts: list[list[Any]]) -> Event:
        self.model.update_drafts(dict(drafts))
        return [drafts]

    def _schedule(self, step: int, *_: object) -> Event:
        try:
            decision = self.model.schedule()
        except (RuntimeError, ValueError) as error:
            return [step, {"error": type(error).__name__}]
        self.in_flight[step] = decision
        return [step, self._decision(decision) | self._queues() | self._neuron(decision)]

    def _update(self, step: int, sampled: list[list[Any]], *_: object) -> Event:
        records = self.model.update(self.in_flight.pop(step), dict(sampled))
        state = self.model.state
        seen = {"outs": [self._record(record) for record in records]}
        live = [self._request(int(row)) for row in state.live()]
        seen |= {"reqs": live} | self._stale() | self._queues() | self._ended()
        return [step, sampled, seen]

    def _stale(self) -> dict[str, Any]:
        """Requests with tokens in flight: how many, how many stale, whether those are dropped."""
        state = self.model.state
        entries = [
            [state.ids[row], *map(int, state.requests[row][["in_flight", "stale", "drop"]].item())]
            for row in state.live()
        ]
        entries = [entry for entry in entries if entry[1] or entry[2]]
        return {"stale": entries} if entries else {}

    def _ids(self, rows: Iterable[int]) -> list[str]:
        return [self.model.state.ids[row] for row in rows]

    def _queues(self) -> dict[str, Any]:
        state = self.model.state
        return {
            "waiting": self._ids(state.waiting),
            "running": self._ids(state.running),
            "free": len(state.pool.free),
        }

    def _decision(self, decision: Decision) -> dict[str, Any]:
        ids = self._ids(decision.rows)
        entries = list(
            zip(
                decision.admitted.tolist(),
                ids,
                decision.computed.tolist(),
                decision.new_blocks,
                decision.outputs.tolist(),
                strict=True,
            )
        )
        running = [
            [name, computed, blocks.tolist() or None, outputs, 0]
            for admitted, name, computed, blocks, outputs in entries
            if admitted == Status.RUNNING
        ]
        resumed = [
            [name, computed, blocks.tolist(), outputs, 1]
            for admitted, name, computed, blocks, outputs in entries
            if admitted == Status.PREEMPTED
        ]
        drafts = [
            [name, tokens.tolist()]
            for name, tokens in zip(ids, decision.drafts, strict=True)
            if len(tokens)
        ]
        return {
            "new": [
                [name, computed, blocks.tolist()]
                for admitted, name, computed, blocks, _ in entries
                if admitted == Status.WAITING
            ],
            "cached": running + resumed,
            "nst": _pairs(ids, decision.num_tokens),
            "total": decision.budget_used,
            "fin": sorted(decision.finished),
            "pre": sorted(decision.all_preempted),
            "alltok": sorted(self._ids(decision.resend)),
            "k": self.model.rules.num_speculative_tokens,
        } | ({"spec": drafts} if drafts else {})

    def _neuron(self, decision: Decision) -> dict[str, Any]:
        state = self.model.state
        if self.model.rules.neuron is None:
            return {}
        padded = _pairs(self._ids(decision.rows), decision.padded)
        return {"pad": padded, "state": state.phase, "padtot": state.padding}

    def _record(self, record: Emitted) -> list[Any]:
        reason = FINISH_REASONS.get(record.status)
        name = self.model.state.ids[record.row]
        return [name, record.new_tokens.tolist(), reason, self._stop_reason(record.row)]

    def _stop_reason(self, row: int) -> int | None:
        reason = int(self.model.state.requests["stop_reason"][row])
        return None if reason == NO_TOKEN else reason

    def _request(self, row: int) -> list[Any]:
        state = self.model.state
        request = state.requests[row]
        outputs = state.num_tokens(row) - int(request["prompt"])
        names = ("computed", "placeholders", "preemptions")
        computed, placeholders, preemptions = (int(request[name]) for name in names)
        status = Status(request["status"]).name
        return [state.ids[row], status, computed, outputs, placeholders, preemptions]

    def _ended(self) -> dict[str, Any]:
        """Requests that finished since the last update, in the order in which they were added."""
        state = self.model.state
        live = set(state.live().tolist())
        ended = [row for row in self.unreported if row not in live]
        self.unreported = [row for row in self.unreported if row in live]
        if not ended:
            return {}
        return {"finished": [self._finished(row) for row in ended]}

    def _finished(self, row: int) -> list[Any]:
        state = self.model.state
        status = Status(state.requests["status"][row])
        outputs = state.tokens[row][state.requests["prompt"][row] :].tolist()
        stop_reason = self._stop_reason(row)
        return [state.ids[row], status.name, FINISH_REASONS[status], stop_reason, outputs]


def _pairs(ids: list[str], values: IntArray) -> list[list[Any]]:
    return [[name, value] for name, value in zip(ids, values.tolist(), strict=True)]


def replay_model(trace: Mapping[str, Any], neuron: NeuronRules | None = None) -> list[Event]:
    """The events of a trace as the model sees them; Neuron kinds by `neuron` (default rules)."""
    rules = rules_of_trace(trace["kind"], trace["config"], neuron or NeuronRules())
    model = ModelTrace(rules)
    return [model.apply(event) for event in trace["events"]]
