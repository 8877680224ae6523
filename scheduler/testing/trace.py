"""Traces: JSON events that drive a scheduler, with what was observed after each.

A trace is a JSON object: `vllm` (the release that it was recorded on, or
nothing), `kind` (base, async, neuron, neuron_async), `config` (keywords of SchedulerConfig) and
`events`. The policy of a Neuron kind is `policy` (fields of NeuronPolicy), or the shipped one when
`source` names a shipped scheduler, or the documented one. Events:

* `["add", request]`, with "RequestError" as third element if it was refused
* `["abort", ids, finished ids]`, `["reset", running 0|1, result, queues]`, `["pause", state]`
* `["drafts", [[id, tokens], ...]]`
* `["schedule", step, output and queues]`, or `["schedule", step, {"error": type}]`
* `["update", step, sampled [[id, tokens], ...], outputs, requests and queues]`
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..config import PauseState, SchedulerConfig
from ..errors import RequestError
from ..neuron_scheduler import NeuronAsyncScheduler, NeuronScheduler
from ..output import DraftTokenIds, EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from ..policy import NeuronPolicy
from ..request import Request, RequestStatus
from ..scheduler import AsyncScheduler, Scheduler

Event = list[Any]

_CONFIG_NAMES = {
    "dynamic_sd": "num_speculative_tokens_per_batch_size",
    "draft_slots": "max_num_new_slots_for_drafting",
}
_DRIVER_OPTIONS = {"depth"}
"""Steps in flight; the events say it themselves."""

EOS_OF_TRACES = 2
"""End-of-sequence token of a request whose event names none."""

CONFIG_DEFAULTS: Mapping[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "block_size": 16,
    "num_blocks": 64,
}


def make_scheduler(
    kind: str, config: Mapping[str, Any], policy: Mapping[str, Any] | None = None
) -> Scheduler:
    """The scheduler of a trace's kind and config. ValueError for an unknown kind."""
    given = {
        _CONFIG_NAMES.get(name, name): value
        for name, value in config.items()
        if name not in _DRIVER_OPTIONS
    }
    scheduler_config = SchedulerConfig(**{**CONFIG_DEFAULTS, **given})
    neuron_policy = NeuronPolicy.documented() if policy is None else NeuronPolicy(**policy)
    match kind:
        case "base":
            return Scheduler(scheduler_config)
        case "async":
            return AsyncScheduler(scheduler_config)
        case "neuron":
            return NeuronScheduler(scheduler_config, neuron_policy)
        case "neuron_async":
            return NeuronAsyncScheduler(scheduler_config, neuron_policy)
    raise ValueError(f"kind={kind!r}: must be base, async, neuron or neuron_async")


def make_request(given: Mapping[str, Any]) -> Request:
    """The request of an "add" event."""
    return Request(
        given["id"],
        given["prompt"],
        given["max_tokens"],
        arrival_time=given.get("arrival", 0.0),
        priority=given.get("priority", 0),
        eos_token_id=given.get("eos", EOS_OF_TRACES),
        stop_token_ids=given.get("stop", ()),
        min_tokens=given.get("min_tokens", 0),
        cache_salt=given.get("salt"),
        skip_reading_prefix_cache=given.get("skip_read", False),
    )


def policy_of(trace: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The policy that a trace was recorded with; None is the documented one."""
    if "source" in trace:
        return asdict(NeuronPolicy.shipped())
    policy: Mapping[str, Any] | None = trace.get("policy")
    return policy


class TraceDriver:
    """A scheduler that consumes events: the engine loop of a trace.

    An error of `schedule` is observed as `{"error": type}`; other errors are the caller's.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.error: Exception | None = None
        """What the latest step raised."""
        self.in_flight: dict[int, SchedulerOutput] = {}
        """Outputs of steps that have not come back, by their number."""
        self._unreported: dict[str, Request] = {}

    def apply(self, event: Event) -> Event:
        """Perform the event's input part; the event with what this scheduler shows after it."""
        name, *given = event
        match name:
            case "add":
                return [name, *self._add(given[0])]
            case "abort":
                aborted = self.scheduler.finish_requests(given[0], RequestStatus.FINISHED_ABORTED)
                return [name, given[0], aborted]
            case "reset":
                return [name, *self._reset(given[0])]
            case "pause":
                self.scheduler.set_pause_state(PauseState(given[0]))
                return [name, given[0]]
            case "drafts":
                ids, tokens = zip(*given[0], strict=True) if given[0] else ((), ())
                self.scheduler.update_draft_token_ids(DraftTokenIds(list(ids), list(tokens)))
                return [name, given[0]]
            case "schedule":
                throttle = len(given) > 1 and bool(given[1].get("throttle"))
                return [name, given[0], self._schedule(given[0], throttle)]
            case "update":
                return [name, given[0], given[1], self._update(given[0], given[1])]
        raise ValueError(f"event={name!r}: no such event")

    def _add(self, given: dict[str, Any]) -> Event:
        request = make_request(given)
        try:
            self.scheduler.add_request(request)
        except RequestError as error:
            return [given, type(error).__name__]
        self._unreported[request.request_id] = request
        return [given]

    def _reset(self, running: int) -> Event:
        try:
            result: bool | str = self.scheduler.reset_prefix_cache(bool(running))
        except RuntimeError as error:
            result = type(error).__name__
        return [running, result, self._queues()]

    def _schedule(self, step: int, throttle: bool) -> dict[str, Any]:
        try:
            output = self.scheduler.schedule(True) if throttle else self.scheduler.schedule()
        except (RuntimeError, ValueError) as error:
            # The documented Neuron policy: a mixed batch, or more tokens than any bucket.
            self.error = error
            return {"error": type(error).__name__}
        self.in_flight[step] = output
        seen = observe_output(output) | self._queues()
        if throttle:
            seen["throttle"] = 1
        if self.scheduler.config.can_skip_drafts:
            seen["skip_drafts"] = int(output.skip_drafts)
        if isinstance(self.scheduler, NeuronScheduler):
            seen["state"] = self.scheduler.state.value
            seen["padtot"] = self.scheduler.total_padding_tokens
        return seen

    def _update(self, step: int, sampled: list[list[Any]]) -> dict[str, Any]:
        model_output = ModelRunnerOutput(
            [request_id for request_id, _ in sampled], [tokens for _, tokens in sampled]
        )
        outputs = self.scheduler.update_from_output(self.in_flight.pop(step), model_output)
        seen = {
            "outs": [_observe_core_output(output) for output in outputs],
            "reqs": [_observe_request(request) for request in self.scheduler.requests.values()],
        }
        finished = {
            request_id: request
            for request_id, request in self._unreported.items()
            if request.is_finished()
        }
        for request_id in finished:
            del self._unreported[request_id]
        if finished:
            seen["finished"] = [_observe_end(request) for request in finished.values()]
        stale = [_observe_flight(request) for request in self.scheduler.requests.values()]
        stale = [entry for entry in stale if entry[1] or entry[2]]
        if stale:
            seen["stale"] = stale
        return seen | self._queues()

    def _queues(self) -> dict[str, Any]:
        return {
            "waiting": [request.request_id for request in self.scheduler.waiting],
            "running": [request.request_id for request in self.scheduler.running],
            "free": self.scheduler.num_free_blocks,
        }


def observe_output(output: SchedulerOutput) -> dict[str, Any]:
    """The fields of a step as a trace shows them."""
    cached = output.scheduled_cached_reqs
    columns = zip(
        cached.req_ids,
        cached.num_computed_tokens,
        cached.new_block_ids,
        cached.num_output_tokens,
        strict=True,
    )
    seen: dict[str, Any] = {
        "new": [
            [new.req_id, new.num_computed_tokens, new.block_ids[0]]
            for new in output.scheduled_new_reqs
        ],
        "cached": [
            [
                request_id,
                num_computed,
                None if block_ids is None else block_ids[0],
                num_output,
                int(request_id in cached.resumed_req_ids),
            ]
            for request_id, num_computed, block_ids, num_output in columns
        ],
        "nst": [list(item) for item in output.num_scheduled_tokens.items()],
        "total": output.total_num_scheduled_tokens,
        "fin": sorted(output.finished_req_ids),
        "pre": sorted(output.preempted_req_ids),
        "alltok": sorted(cached.all_token_ids),
        "k": output.num_spec_tokens_to_schedule,
    }
    if output.scheduled_spec_decode_tokens:
        seen["spec"] = [list(item) for item in output.scheduled_spec_decode_tokens.items()]
    if output.num_scheduled_tokens_padded is not None:
        seen["pad"] = [list(item) for item in output.num_scheduled_tokens_padded.items()]
    return seen


def _observe_core_output(output: EngineCoreOutput) -> list[Any]:
    return [
        output.request_id,
        output.new_token_ids,
        output.finish_reason,
        output.stop_reason,
    ]


def _observe_request(request: Request) -> list[Any]:
    return [
        request.request_id,
        request.status.name,
        request.num_computed_tokens,
        request.num_output_tokens,
        request.num_output_placeholders,
        request.num_preemptions,
    ]


def _observe_flight(request: Request) -> list[Any]:
    return [
        request.request_id,
        request.num_in_flight_tokens,
        request.num_stale_output_tokens,
        int(request.drop_stale_output),
    ]


def _observe_end(request: Request) -> list[Any]:
    return [
        request.request_id,
        request.status.name,
        request.status.finish_reason,
        request.stop_reason,
        request.output_token_ids.copy(),
    ]
