"""The Neuron rules as one layer over a base scheduler that knows nothing of them.

A compiled graph computes either one prefill chunk or a batch of decodes, never both, and a running
request cannot be preempted. The layer keeps these rules without touching the base's algorithm: it
shows the base only the requests that may be scheduled together (the holdback pattern), lets it
schedule, adds padded counts, and puts the hidden requests back. The same class runs over this
project's schedulers and over vLLM's, so it uses vLLM's attribute names.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from .admission import Admission
from .config import PauseState
from .output import SchedulerOutput, StepKind
from .phases import padded_counts, prefills_of
from .policy import NeuronPolicy
from .request import Request
from .request_queue import RequestQueue
from .turns import Turns

if TYPE_CHECKING:
    from .scheduler import Scheduler as _BaseScheduler
else:
    # At run time the base is whatever stands behind this class in the method resolution order.
    _BaseScheduler = object


class SchedulerState(Enum):
    """What the scheduler is doing."""

    IDLE = "IDLE"
    ACTIVE_PREFILL = "ACTIVE_PREFILL"
    ACTIVE_DECODE = "ACTIVE_DECODE"


class NeuronRules(_BaseScheduler):
    """Prefill/decode separation, admission control and padded counts over a base scheduler.

    Comes before the base in a class's bases; the class calls `_init_neuron` after the base's
    `__init__` and answers the questions to the base. `total_padding_tokens` counts the padding of
    all prefill steps.
    """

    max_prefills_per_batch = 1
    waiting_queue_names: tuple[str, ...] = ("waiting",)
    """Attributes of the base that queue requests to be run, in the order it looks at them."""

    def _init_neuron(
        self, neuron_policy: NeuronPolicy, prefill_buckets: Sequence[int], num_blocks: int
    ) -> None:
        """Set up the layer; `num_blocks` includes the null block."""
        self.neuron_policy = neuron_policy
        self.num_usable_blocks = num_blocks - 1
        if neuron_policy.is_literal:
            self.max_kv_concurrent = self._max_concurrency(num_blocks) or self.max_num_running_reqs
            self.waiting_queue_names = ("waiting",)
        else:
            self.max_kv_concurrent = max(1, self._max_concurrency(num_blocks - 1))
        self.prefill_buckets = tuple(prefill_buckets)
        self.total_padding_tokens = 0
        self.running_holdback: list[Request] = []
        self.holdback_queues: dict[str, RequestQueue] = {
            name: type(getattr(self, name))() for name in self.waiting_queue_names
        }
        self._refusals: dict[str, Admission] = {}
        self._decode_turn = False
        self._step_state = SchedulerState.IDLE
        self.turns = Turns(neuron_policy)

    # Questions to the base.

    def _max_concurrency(self, num_blocks: int) -> int:
        """Requests of max_model_len that fit into `num_blocks` at once."""
        raise NotImplementedError

    def _num_blocks_needed(self, request: Request) -> int:
        """Most blocks that `request` can own at a time."""
        raise NotImplementedError

    def _is_ready(self, request: Request) -> bool:
        """Whether a waiting request waits for nothing but its turn."""
        return True

    def _may_admit(self, request: Request) -> bool:
        """Whether the base admits `request` in its pause state."""
        return self._pause_state == PauseState.UNPAUSED

    def _waiting_with_blocks(self) -> Iterable[Request]:
        """Requests that own blocks although they are not in `running`."""
        return ()

    def _defers_prefills(self, throttle_prefills: bool) -> bool:
        """Whether the base would put prefills off while something decodes."""
        raise NotImplementedError

    def _base_stop(self) -> Admission:
        """Why the base did not schedule a request that it could see."""
        raise NotImplementedError

    def _decodes_of_a_step(self, decodes: list[Request]) -> list[Request]:
        """Those of the running decodes that the next decode step serves."""
        return decodes

    def _num_decode_rounds(self) -> int:
        """Steps that it takes to serve all running requests."""
        return 1

    def _queues_in_turn(self) -> Sequence[str]:
        """Names of the waiting queues in the order in which the base would look at them."""
        return self.waiting_queue_names

    def _step_was_refused(self, output: SchedulerOutput, error: BaseException) -> None:
        """The layer cannot take the base's step, for which it raises `error`."""

    # Admission.

    @property
    def at_capacity(self) -> bool:
        """Whether as many requests run as are allowed."""
        return len(self.running) >= self.max_num_running_reqs

    @property
    def has_prefill_in_running(self) -> bool:
        """Whether a running request is in its prefill phase."""
        return bool(prefills_of(self.running, self.neuron_policy.phase_test))

    def can_schedule(self, request: Request) -> Admission:
        """Whether the step that is being scheduled may admit `request`, or why not.

        Asked while the waiting queues hold only what this step admits already.
        """
        if not self.neuron_policy.is_literal and not self._may_admit(request):
            return Admission.PAUSED
        if self._decode_turn:
            return Admission.DECODE_TURN
        if self.at_capacity:
            return Admission.MAX_NUM_SEQS
        if self.has_prefill_in_running:
            return Admission.PREFILL_RUNNING
        if self._num_waiting() >= self.max_prefills_per_batch:
            return Admission.PREFILL_BATCH
        if not self._kv_cache_has_room(request):
            return Admission.KV_BLOCKS
        return Admission.ADMITTED

    def waiting_reasons(self) -> dict[str, Admission]:
        """Why the latest step did not start each waiting request, by request id."""
        # A step that refused nobody left nobody waiting: they came since.
        otherwise = Admission.BEHIND if self._refusals else Admission.NOT_SCHEDULED
        return {
            request.request_id: self._refusals.get(request.request_id, otherwise)
            for name in self.waiting_queue_names
            for request in getattr(self, name)
        }

    def _kv_cache_has_room(self, request: Request) -> bool:
        """Whether `request` can run to its end beside the running ones, whatever they need."""
        others = self.running
        if not self.neuron_policy.is_literal:
            others = [*others, *(r for r in self._waiting_with_blocks() if r is not request)]
        if self.neuron_policy.kv_admission == "worst_case":
            return len(others) < self.max_kv_concurrent
        needed = sum(map(self._num_blocks_needed, (*others, request)))
        return needed <= self.num_usable_blocks

    def _num_waiting(self) -> int:
        return sum(len(getattr(self, name)) for name in self.waiting_queue_names)

    # The step.

    @property
    def state(self) -> SchedulerState:
        """What the latest step did; IDLE as soon as nothing is queued."""
        if not self.neuron_policy.is_literal and not (self.running or self._num_waiting()):
            return SchedulerState.IDLE
        return self._step_state

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one prefill chunk or a batch of decodes.

        Raises RuntimeError if the base mixed the two, and what the base raises; every request is
        in its queue then.
        """
        running = self.running
        self._decode_turn = self._is_decode_turn(throttle_prefills)
        output: SchedulerOutput | None = None
        try:
            self._hide_waiting()
            refusals = self._show_admitted()
            self._separate_phases()
            output = super().schedule(throttle_prefills)
            self._finish_step(output, refusals)
            self._restore(running)
        except BaseException as error:
            if output is not None:
                self._step_was_refused(output, error)
            # Once more if it was interrupted itself.
            self._restore(running)
            raise
        return output

    def _is_decode_turn(self, throttle_prefills: bool) -> bool:
        """Whether decodes have waited long enough, and one of them can run."""
        is_due = self.turns.decodes_are_due or self._defers_prefills(throttle_prefills)
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
        here, held = vars(self), self.holdback_queues
        for name in held:
            # In one line: between two, an interrupt would leave one queue under both names.
            here[name], held[name] = held[name], here[name]

    def _show_admitted(self) -> dict[str, Admission]:
        """Give the base the requests that it may admit; return why others may not be."""
        refusals: dict[str, Admission] = {}
        for name in self._queues_in_turn():
            held = self.holdback_queues[name]
            not_ready: list[Request] = []
            try:
                while held:
                    request = held.peek_request()
                    if not self.neuron_policy.is_literal and not self._is_ready(request):
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

    def _separate_phases(self) -> None:
        """Hide the running requests that may not share a step with the others."""
        running = self.running
        prefills = prefills_of(running, self.neuron_policy.phase_test)
        if prefills and not self._decode_turn:
            shown = prefills
        elif self._num_waiting():
            shown = []
        else:
            decodes = running
            if prefills:
                prefill_ids = set(map(id, prefills))
                decodes = [request for request in running if id(request) not in prefill_ids]
            shown = self._decodes_of_a_step(decodes)
        if len(shown) < len(running):
            shown_ids = set(map(id, shown))
            hidden = [request for request in running if id(request) not in shown_ids]
            self.running, self.running_holdback = shown, hidden

    def _finish_step(self, output: SchedulerOutput, refusals: dict[str, Admission]) -> None:
        """Pad the step's counts and take note of it. All that can fail comes first."""
        phase_test = self.neuron_policy.phase_test
        padded, kind = padded_counts(output, self.requests, self.prefill_buckets, phase_test)
        state = self._state_after(kind)
        self._note_refusals(refusals)
        output.num_scheduled_tokens_padded, output.step_kind = padded, kind
        self.total_padding_tokens += sum(padded.values()) - output.total_num_scheduled_tokens
        self._step_state = state
        if kind == "prefill":
            self.turns.note_prefill(self._num_decode_rounds())
        elif kind == "decode":
            self.turns.note_decode()
        else:
            is_paused = self._pause_state == PauseState.PAUSED_ALL
            is_stuck = bool(self.running_holdback) and not is_paused
            self.turns.note_empty(is_stuck and not self.neuron_policy.is_literal)

    def _note_refusals(self, refusals: dict[str, Admission]) -> None:
        """Count why each waiting request waits; those that the base could see it counts itself."""
        stop = self._base_stop()
        shown = [r.request_id for name in self.holdback_queues for r in getattr(self, name)]
        self._refusals = refusals | dict.fromkeys(shown, stop)
        for verdict in refusals.values():
            self.admission_counts[verdict] += 1
        num_held = sum(map(len, self.holdback_queues.values()))
        self.admission_counts[Admission.BEHIND] += num_held - len(refusals)

    def _state_after(self, kind: StepKind) -> SchedulerState:
        if kind != "empty":
            return SchedulerState[f"ACTIVE_{kind.upper()}"]
        running = [*self.running, *self.running_holdback]
        if self.neuron_policy.is_literal:
            is_waiting = self._num_waiting() or any(self.holdback_queues.values())
            return self._step_state if running or is_waiting else SchedulerState.IDLE
        if prefills_of(running, self.neuron_policy.phase_test):
            return SchedulerState.ACTIVE_PREFILL
        return SchedulerState.ACTIVE_DECODE if running else SchedulerState.IDLE

    def _restore(self, running: list[Request]) -> None:
        """Put back what was hidden; `running` is the list from before the step."""
        if self.running_holdback:
            merged = [*self.running, *self.running_holdback]
            if not self.neuron_policy.is_literal:
                admission = {id(request): index for index, request in enumerate(running)}
                merged.sort(key=lambda request: admission.get(id(request), len(admission)))
            self.running, self.running_holdback = merged, []
        for name, held in self.holdback_queues.items():
            shown = getattr(self, name)
            left_over: list[Request] = []
            while shown:
                left_over.append(shown.pop_request())
            _prepend(held, left_over)
            vars(self)[name], self.holdback_queues[name] = held, shown


def _prepend(queue: RequestQueue, requests: Sequence[Request]) -> None:
    """Put `requests` in front of the queue in their own order."""
    for request in reversed(requests):
        queue.prepend_request(request)
