"""Drives a real scheduler and records a trace of it, in the format that `segattn` replays."""

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from segattn.benchmarks.scheduler.vllm_reference import make_real_request, make_real_scheduler
from segattn.scheduler import NeuronPolicy, SchedulerConfig
from segattn.scheduler.testing.trace import CONFIG_DEFAULTS

Sampled = list[list[Any]]
"""[[request id, tokens], ...] in the order of the step."""


class NegativeCountError(Exception):
    """vLLM scheduled fewer than one token for a request; the step is not recorded.

    0.24 does so for a request that min_tokens keeps alive at max_model_len and that is resumed:
    its waiting queue admits max_model_len tokens, the next step computes max_model_len - 1 minus
    that. This project schedules nothing for it.
    """


class Recorder:
    """A real scheduler and the events so far; `in_flight` are the steps not yet updated."""

    def __init__(
        self, kind: str, config: Mapping[str, Any], policy: NeuronPolicy | None = None
    ) -> None:
        self.config = SchedulerConfig(**{**CONFIG_DEFAULTS, **config})
        self.scheduler = make_real_scheduler(kind, self.config, policy)
        self.is_neuron = kind.startswith("neuron")
        self.events: list[list[Any]] = []
        self.in_flight: deque[tuple[int, Any, Sampled]] = deque()
        self._num_steps = 0
        self._unreported: dict[str, Any] = {}
        self._trace = {"id": "live", "kind": kind, "config": dict(config)}
        if policy is not None:
            self._trace["policy"] = asdict(policy)

    @property
    def trace(self) -> dict[str, Any]:
        """The trace of all events so far."""
        return {**self._trace, "events": self.events}

    def add(self, **given: Any) -> None:
        """Add a request; one that the Neuron rules refuse is noted and left out."""
        request = make_real_request(given, self.config)
        if (
            self.is_neuron
            and not self.scheduler.neuron_policy.is_literal
            and self.scheduler._unschedulable_reason(request) is not None
        ):
            self.events.append(["add", given, "RequestError"])
            return
        self._unreported[given["id"]] = request
        self.scheduler.add_request(request)
        self.events.append(["add", given])

    def abort(self, request_ids: list[str]) -> None:
        """Abort requests one by one: vLLM iterates a set when it gets several."""
        aborted: list[str] = []
        for request_id in request_ids:
            ended = self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            aborted += [one[0] if isinstance(one, tuple) else one.request_id for one in ended]
        self.events.append(["abort", request_ids, aborted])

    def reset(self, running: bool) -> None:
        """Reset the prefix cache."""
        result = self.scheduler.reset_prefix_cache(reset_running_requests=running)
        self.events.append(["reset", int(running), result, self._queues()])

    def pause(self, state: int) -> None:
        """Set the pause state."""
        self.scheduler.set_pause_state(PauseState(state))
        self.events.append(["pause", state])

    def drafts(self, drafts: Sampled) -> None:
        """Hand in draft tokens for the next step."""
        ids = [request_id for request_id, _ in drafts]
        tokens = [list(tokens) for _, tokens in drafts]
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, tokens))
        self.events.append(["drafts", drafts])

    def schedule(self) -> Any:
        """Schedule a step, in flight from now on; returns vLLM's output."""
        output = self.scheduler.schedule()
        if any(count < 1 for count in output.num_scheduled_tokens.values()):
            raise NegativeCountError
        seen = self._observe(output) | self._queues()
        if self.is_neuron:
            seen["pad"] = [list(item) for item in output.num_scheduled_tokens_padded.items()]
            seen["state"] = self.scheduler.state.value
            seen["padtot"] = self.scheduler.total_padding_tokens
        self.events.append(["schedule", self._num_steps, seen])
        self._num_steps += 1
        return output

    def launch(self, output: Any, sampled: Sampled) -> None:
        """Note what the model makes of the step just scheduled."""
        self.in_flight.append((self._num_steps - 1, output, sampled))

    def update(self) -> None:
        """Deliver the oldest step in flight."""
        step, output, sampled = self.in_flight.popleft()
        ids = [request_id for request_id, _ in sampled]
        model_output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[list(tokens) for _, tokens in sampled],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        outputs = self.scheduler.update_from_output(output, model_output)
        seen: dict[str, Any] = {
            "outs": [
                [
                    one.request_id,
                    list(one.new_token_ids),
                    None if one.finish_reason is None else str(one.finish_reason),
                    one.stop_reason,
                ]
                for one in (outputs[0].outputs if 0 in outputs else ())
            ],
            "reqs": [_observe_request(one) for one in self.scheduler.requests.values()],
        }
        ended = [one for one in self._unreported.values() if one.is_finished()]
        for request in ended:
            del self._unreported[request.request_id]
        if ended:
            seen["finished"] = [
                [
                    one.request_id,
                    one.status.name,
                    str(one.get_finished_reason()),
                    one.stop_reason,
                    list(one.output_token_ids),
                ]
                for one in ended
            ]
        self.events.append(["update", step, sampled, seen | self._queues()])

    def _queues(self) -> dict[str, Any]:
        return {
            "waiting": [request.request_id for request in self.scheduler.waiting],
            "running": [request.request_id for request in self.scheduler.running],
            "free": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }

    def _observe(self, output: Any) -> dict[str, Any]:
        cached = output.scheduled_cached_reqs
        seen: dict[str, Any] = {
            "new": [
                [new.req_id, new.num_computed_tokens, list(new.block_ids[0])]
                for new in output.scheduled_new_reqs
            ],
            "cached": [
                [
                    request_id,
                    cached.num_computed_tokens[index],
                    None
                    if cached.new_block_ids[index] is None
                    else list(cached.new_block_ids[index][0]),
                    cached.num_output_tokens[index],
                    int(request_id in cached.resumed_req_ids),
                ]
                for index, request_id in enumerate(cached.req_ids)
            ],
            "nst": [list(item) for item in output.num_scheduled_tokens.items()],
            "total": output.total_num_scheduled_tokens,
            "fin": sorted(output.finished_req_ids),
            "pre": sorted(output.preempted_req_ids or ()),
            "alltok": sorted(cached.all_token_ids),
        }
        if output.num_common_prefix_blocks:
            seen["common"] = output.num_common_prefix_blocks[0]
        if output.scheduled_spec_decode_tokens:
            seen["spec"] = [
                [request_id, list(tokens)]
                for request_id, tokens in output.scheduled_spec_decode_tokens.items()
            ]
        return seen


def _observe_request(request: Any) -> list[Any]:
    return [
        request.request_id,
        request.status.name,
        request.num_computed_tokens,
        request.num_output_tokens,
        request.num_output_placeholders,
        request.num_preemptions,
    ]
