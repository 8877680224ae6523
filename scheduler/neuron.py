"""The Neuron rules as one layer over a base scheduler that knows nothing of them.

A compiled graph computes either one prefill chunk or a batch of decodes, never both, and a running
request cannot be preempted. The layer keeps these rules without touching the base's algorithm: it
shows the base only the requests that may be scheduled together (the holdback pattern), lets it
schedule, adds padded counts, and puts the hidden requests back. The same class runs over this
project's schedulers and over vLLM's, so it uses vLLM's attribute names.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from ..reference.paging import smallest_bucket
from .admission import Admission
from .admission_control import AdmissionControl
from .output import SchedulerOutput
from .pause_state import PauseState
from .policy import NeuronPolicy, is_prefill, prefills_of
from .request import Request
from .request_queue import RequestQueue

_Queues = tuple[RequestQueue, RequestQueue, list[Request]]
"""A queue that hides requests, the one that the base sees, and what it holds."""


class SchedulerState(Enum):
    """What the scheduler is doing."""

    IDLE = "IDLE"
    ACTIVE_PREFILL = "ACTIVE_PREFILL"
    ACTIVE_DECODE = "ACTIVE_DECODE"


class NeuronRules(AdmissionControl):
    """Prefill/decode separation, admission control and padded counts over a base scheduler.

    Comes before the base in a class's bases; the class calls `_init_neuron` after the base's
    `__init__` and answers the questions to the base. `total_padding_tokens` counts the padding of
    all prefill steps.
    """

    def _init_neuron(
        self, neuron_policy: NeuronPolicy, prefill_buckets: Sequence[int], num_blocks: int
    ) -> None:
        """Set up the layer; `num_blocks` includes the null block."""
        self._init_admission(neuron_policy, num_blocks)
        self.prefill_buckets = tuple(prefill_buckets)
        self.total_padding_tokens = 0
        self.running_holdback: list[Request] = []
        self.holdback_queues: dict[str, RequestQueue] = {
            name: type(getattr(self, name))() for name in self.waiting_queue_names
        }
        self._step_state = SchedulerState.IDLE
        self._num_consecutive_prefills = 0
        self._prefill_was_stuck = False

    @property
    def state(self) -> SchedulerState:
        """What the latest step did; with `state_from_queues` IDLE as soon as nothing is queued."""
        if self.neuron_policy.state_from_queues and not (self.running or self._num_waiting()):
            return SchedulerState.IDLE
        return self._step_state

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one prefill chunk or a batch of decodes.

        Raises RuntimeError if the base mixed the two, and what the base raises; the scheduler is
        then as it was before the call.
        """
        running = self.running
        with self._transaction:
            self._record_undo(self._restore, running)
            self._record_undo(self.__dict__.update, self._notes())
            self._decode_turn = self._is_decode_turn(throttle_prefills)
            self._hide_waiting()
            refusals = self._show_admitted()
            self._separate_phases()
            output = super().schedule(throttle_prefills)
            self._finish_step(output, refusals)
            self._record_undo(self._hide_again, *self._hidden_and_shown())
            self._restore(running)
            return output

    def _record_undo(self, undo: Callable[..., object], *args: object) -> None:
        """Let the transaction take back the change that follows, if the policy says so."""
        if self.neuron_policy.restore_on_error:
            self._transaction.record((undo, *args))

    def _notes(self) -> dict[str, object]:
        """What the layer keeps from step to step besides the queues."""
        names = (
            "total_padding_tokens",
            "_step_state",
            "_num_consecutive_prefills",
            "_prefill_was_stuck",
            "_refusals",
            "_decode_turn",
        )
        notes = {name: getattr(self, name) for name in names}
        return notes | {"admission_counts": self.admission_counts.copy()}

    def _is_decode_turn(self, throttle_prefills: bool) -> bool:
        """Whether decodes have waited long enough, and one of them can run."""
        limit = self.neuron_policy.max_consecutive_prefills
        is_due = (
            self._prefill_was_stuck
            or (limit is not None and self._num_consecutive_prefills >= limit)
            or self._defers_prefills(throttle_prefills)
        )
        return is_due and self._some_decode_can_run()

    def _some_decode_can_run(self) -> bool:
        """Whether the base would schedule a running decode.

        In async scheduling it passes over a request whose token in flight is certain to be the
        last one, even if all drafts in flight are rejected.
        """
        prefills = set(map(id, prefills_of(self.running, self.neuron_policy.phase_test)))
        for request in self.running:
            computed = request.num_computed_tokens
            placeholders = request.num_output_placeholders
            is_certain_to_finish = (
                placeholders > 0
                and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens
            )
            known = request.num_tokens + len(request.spec_token_ids) + placeholders
            has_tokens = min(known, self.max_model_len - 1) > computed
            if has_tokens and not is_certain_to_finish and id(request) not in prefills:
                return True
        return False

    def _hide_waiting(self) -> None:
        """Take the waiting requests out of the base's sight by exchanging the queues."""
        for name, held in self.holdback_queues.items():
            waiting = getattr(self, name)
            if held:
                # A failed step did not restore these (documented policy): they go first.
                while waiting:
                    held.add_request(waiting.pop_request())
            else:
                self._record_undo(self._finish_exchange, name, held)
                self.holdback_queues[name] = waiting
                setattr(self, name, held)

    def _show_admitted(self) -> dict[str, Admission]:
        """Give the base the requests that it may admit; return why others may not be."""
        refusals: dict[str, Admission] = {}
        for name in self._queues_in_turn():
            held = self.holdback_queues[name]
            not_ready: list[Request] = []
            try:
                while held:
                    request = held.peek_request()
                    self._record_undo(self._recover, name, request)
                    if self.neuron_policy.hold_back_skipped_waiting and not self._is_ready(request):
                        refusals[request.request_id] = Admission.BLOCKED
                        not_ready.append(held.pop_request())
                        continue
                    verdict = self.can_schedule(request)
                    if not verdict:
                        refusals[request.request_id] = verdict
                        return refusals
                    getattr(self, name).add_request(held.pop_request())
            finally:
                _prepend(held, not_ready)
        return refusals

    def _queues_in_turn(self) -> Sequence[str]:
        """Names of the waiting queues in the order in which the base would look at them."""
        return self.waiting_queue_names

    def _separate_phases(self) -> None:
        """Hide the running requests that may not share a step with the others."""
        prefills = prefills_of(self.running, self.neuron_policy.phase_test)
        if prefills:
            prefill_ids = set(map(id, prefills))
            decodes = [request for request in self.running if id(request) not in prefill_ids]
            if self._decode_turn:
                self.running, self.running_holdback = decodes, prefills
            else:
                self.running, self.running_holdback = prefills, decodes
        elif self._num_waiting():
            self.running, self.running_holdback = [], self.running

    def _finish_step(self, output: SchedulerOutput, refusals: dict[str, Admission]) -> None:
        """Pad the step's counts and take note of it. All that can fail comes first."""
        padded, has_prefill = self._padded_counts(output)
        num_tokens = output.total_num_scheduled_tokens
        state = self._state_after(num_tokens > 0, has_prefill)
        not_scheduled = [r.request_id for name in self.holdback_queues for r in getattr(self, name)]
        num_held = sum(map(len, self.holdback_queues.values()))

        self._note_refusals(refusals, num_held, not_scheduled)
        output.num_scheduled_tokens_padded = padded
        output.step_kind = "empty" if not num_tokens else "prefill" if has_prefill else "decode"
        self.total_padding_tokens += sum(padded.values()) - num_tokens
        self._step_state = state
        self._num_consecutive_prefills = self._num_consecutive_prefills + 1 if has_prefill else 0
        self._prefill_was_stuck = (
            self.neuron_policy.usable_blocks_only
            and num_tokens == 0
            and bool(self.running_holdback)
            and self._pause_state != PauseState.PAUSED_ALL
        )

    def _padded_counts(self, output: SchedulerOutput) -> tuple[dict[str, int], bool]:
        """Tokens per request with each prefill chunk padded to its bucket; whether there is one."""
        padded = dict(output.num_scheduled_tokens)
        phase_test = self.neuron_policy.phase_test
        num_prefills = 0
        for req_id, num_computed_tokens in _computed_before(output):
            request = self.requests[req_id]
            if is_prefill(
                num_computed_tokens, request.num_prompt_tokens, request.num_tokens, phase_test
            ):
                num_prefills += 1
                padded[req_id] = smallest_bucket(padded[req_id], self.prefill_buckets)
        if 0 < num_prefills < len(padded):
            raise RuntimeError(
                f"prefill and decode in one step: {num_prefills} of the {len(padded)} requests in "
                f"{output.num_scheduled_tokens} are in their prefill phase"
            )
        return padded, num_prefills > 0

    def _state_after(self, has_tokens: bool, has_prefill: bool) -> SchedulerState:
        running = [*self.running, *self.running_holdback]
        if has_tokens:
            return SchedulerState.ACTIVE_PREFILL if has_prefill else SchedulerState.ACTIVE_DECODE
        if not self.neuron_policy.state_from_queues:
            is_waiting = self._num_waiting() or any(self.holdback_queues.values())
            return self._step_state if running or is_waiting else SchedulerState.IDLE
        if prefills_of(running, self.neuron_policy.phase_test):
            return SchedulerState.ACTIVE_PREFILL
        return SchedulerState.ACTIVE_DECODE if running else SchedulerState.IDLE

    def _restore(self, running: list[Request]) -> None:
        """Put back what was hidden; `running` is the list from before the step."""
        if self.running_holdback:
            merged = [*self.running, *self.running_holdback]
            if self.neuron_policy.restore_order == "admission":
                admission = {id(request): index for index, request in enumerate(running)}
                merged.sort(key=lambda request: admission.get(id(request), len(admission)))
            self.running, self.running_holdback = merged, []
        for name, held in self.holdback_queues.items():
            shown = getattr(self, name)
            left_over: list[Request] = []
            while shown:
                left_over.append(shown.pop_request())
            _prepend(held, left_over)
            setattr(self, name, held)
            self.holdback_queues[name] = shown

    def _recover(self, name: str, request: Request) -> None:
        """Put a request back that a failure caught between two queues."""
        held = self.holdback_queues[name]
        if not any(request in queue for queue in (held, getattr(self, name), self.running)):
            held.prepend_request(request)

    def _finish_exchange(self, name: str, shown: RequestQueue) -> None:
        """Hide a queue that a failure caught half hidden, for `_restore` to show it again."""
        if getattr(self, name) is self.holdback_queues[name]:
            setattr(self, name, shown)

    def _hidden_and_shown(self) -> tuple[list[Request], list[Request], dict[str, _Queues]]:
        """The state that `_restore` ends, for `_hide_again`."""
        queues: dict[str, _Queues] = {}
        for name, held in self.holdback_queues.items():
            shown = getattr(self, name)
            queues[name] = (held, shown, list(shown))
        return self.running, self.running_holdback, queues

    def _hide_again(
        self, running: list[Request], holdback: list[Request], queues: dict[str, _Queues]
    ) -> None:
        """Undo `_restore`, wherever it failed."""
        self.running, self.running_holdback = running, holdback
        for name, (held, shown, requests) in queues.items():
            setattr(self, name, shown)
            self.holdback_queues[name] = held
            while shown:
                shown.pop_request()
            for request in requests:
                if request in held:
                    held.remove_request(request)
                shown.add_request(request)


def _prepend(queue: RequestQueue, requests: Sequence[Request]) -> None:
    """Put `requests` in front of the queue in their own order."""
    for request in reversed(requests):
        queue.prepend_request(request)


def _computed_before(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Each scheduled request with the tokens it had computed before the step."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
