"""The Neuron rules, over a scheduler that knows nothing of them.

A compiled graph computes either one prefill chunk or a batch of decodes, never both, and a running
request cannot be preempted. The rules hold without a change of the scheduler's algorithm: they show
it only the requests that may be scheduled together, let it schedule, add padded counts, and put the
hidden requests back. They run over this project's schedulers and over vLLM's, so they use vLLM's
attribute names.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from .admission import Admission
from .config import PauseState
from .holdback import Hidden, Holdback, prepend
from .output import SchedulerOutput
from .phases import padded_counts, prefills_of
from .policy import NeuronPolicy
from .request import Request
from .turns import Turns


class SchedulerState(Enum):
    """What the scheduler is doing."""

    IDLE = "IDLE"
    ACTIVE_PREFILL = "ACTIVE_PREFILL"
    ACTIVE_DECODE = "ACTIVE_DECODE"


_ACTIVE = {"prefill": SchedulerState.ACTIVE_PREFILL, "decode": SchedulerState.ACTIVE_DECODE}


class Answers(Protocol):
    """What the rules ask about the scheduler under them."""

    def at_capacity(self) -> bool:
        """Whether as many requests run as are allowed."""

    def may_admit(self, request: Request) -> bool:
        """Whether the pause state lets `request` start."""

    def is_ready(self, request: Request) -> bool:
        """Whether a waiting request waits for nothing but its turn."""

    def has_room(self, request: Request) -> bool:
        """Whether `request` can run to its end beside the running ones, whatever they need."""

    def adds_no_prefill(self, request: Request) -> bool:
        """Whether decodes can run beside the admission of `request`."""

    def defers_prefills(self, throttle_prefills: bool) -> bool:
        """Whether prefills are put off while something decodes."""

    def queues_in_turn(self) -> Sequence[str]:
        """Names of the waiting queues in the order in which the scheduler looks at them."""

    def reason_of_stop(self) -> Admission | None:
        """Why a request that was shown was not scheduled; None if the scheduler does not say."""

    def take_back(self, output: SchedulerOutput, error: BaseException) -> None:
        """Undo a step that the rules refuse with `error`."""


class NeuronRules:
    """Prefill/decode separation, admission control and padded counts over `scheduler`.

    `max_decodes` is the number of decodes that the budgets of a step hold. `total_padding_tokens`
    counts the padding of all prefill steps.
    """

    max_prefills_per_batch = 1

    def __init__(
        self,
        scheduler: Hidden,
        answers: Answers,
        policy: NeuronPolicy,
        prefill_buckets: Sequence[int],
        queue_names: Sequence[str],
        max_decodes: int,
    ) -> None:
        self.scheduler = scheduler
        self.answers = answers
        self.policy = policy
        self.prefill_buckets = tuple(prefill_buckets)
        self.total_padding_tokens = 0
        self._is_literal, self._phase_test = policy.is_literal, policy.phase_test
        self.holdback = Holdback(scheduler, queue_names, not policy.is_literal)
        self.turns = Turns(policy, max_decodes)
        self.is_decode_turn = False
        self.refusals: dict[str, Admission] = {}
        self._step_state = SchedulerState.IDLE

    @property
    def state(self) -> SchedulerState:
        """What the latest step did; IDLE as soon as nothing is queued."""
        is_empty = not (self.scheduler.running or self.holdback.num_shown())
        if is_empty and not self._is_literal:
            return SchedulerState.IDLE
        return self._step_state

    def counted(self, counts: tuple[int, int]) -> tuple[int, int]:
        """Running and waiting requests, of which the scheduler sees `counts`.

        The hidden ones count, but not in the literal policies, as in the design document.
        """
        if self._is_literal:
            return counts
        held = self.holdback
        return counts[0] + len(held.running), counts[1] + held.num_waiting()

    def waiting_reasons(self) -> dict[str, Admission]:
        """Why the latest step did not start each waiting request, by request id."""
        # A step that refused nobody left nobody waiting: they came since.
        otherwise = Admission.BEHIND if self.refusals else Admission.NOT_SCHEDULED
        names = [request.request_id for request in self.holdback.shown()]
        return {name: self.refusals.get(name, otherwise) for name in names}

    def can_schedule(self, request: Request) -> Admission:
        """Whether the step that is being scheduled may admit `request`, or why not.

        Asked while the waiting queues hold only what this step admits already.
        """
        if not self._is_literal and not self.answers.may_admit(request):
            return Admission.PAUSED
        if self.is_decode_turn:
            return Admission.DECODE_TURN
        if self.answers.at_capacity():
            return Admission.MAX_NUM_SEQS
        if self._prefills():
            return Admission.PREFILL_RUNNING
        if self.holdback.num_shown() >= self.max_prefills_per_batch:
            return Admission.PREFILL_BATCH
        if not self.answers.has_room(request):
            return Admission.KV_BLOCKS
        return Admission.ADMITTED

    def schedule(
        self, schedule: Callable[[bool], SchedulerOutput], throttle_prefills: bool
    ) -> SchedulerOutput:
        """One prefill chunk or a batch of decodes, decided by the scheduler's own `schedule`.

        Raises RuntimeError if it mixed the two, and what it raises; every request is in its queue
        then.
        """
        running = self.scheduler.running
        is_plain = self._hides_nothing()
        output: SchedulerOutput | None = None
        try:
            refusals, joins = ({}, False) if is_plain else self._hide(throttle_prefills)
            output = schedule(throttle_prefills)
            if joins and output.num_scheduled_tokens:
                output.step_kind = "decode"
            self._finish_step(output, refusals)
            if not is_plain:
                self.holdback.restore(running)
        except BaseException as error:
            if output is not None:
                self.answers.take_back(output, error)
            # Once more if it was interrupted itself.
            self.holdback.restore(running)
            raise
        return output

    def _hides_nothing(self) -> bool:
        """Whether all requests are running decodes that one step holds: most steps are so."""
        running = self.scheduler.running
        if (
            len(running) != len(self.scheduler.requests)
            or len(running) > self.turns.max_decodes
            or self._is_literal
            or prefills_of(running, self._phase_test)
        ):
            return False
        self.is_decode_turn = False
        return True

    def _hide(self, throttle_prefills: bool) -> tuple[dict[str, Admission], bool]:
        """Leave in sight what may share a step.

        Returns why waiting requests may not start, and whether decodes run beside one that does.
        """
        is_due = self.turns.decodes_are_due or self.answers.defers_prefills(throttle_prefills)
        self.is_decode_turn = is_due and self._some_decode_can_run()
        self.holdback.hide_waiting()
        refusals = self._show_admitted()
        return refusals, self._separate_phases()

    def _some_decode_can_run(self) -> bool:
        """Whether the scheduler would schedule a running decode.

        In async scheduling it passes over a request whose token in flight is certain to be the
        last one, even if all drafts in flight are rejected.
        """
        prefills = set(map(id, self._prefills()))
        for request in self.scheduler.running:
            computed = request.num_computed_tokens
            placeholders = request.num_output_placeholders
            is_certain_to_finish = (
                placeholders > 0
                and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens
            )
            known = request.num_tokens + len(request.spec_token_ids) + placeholders
            has_tokens = min(known, self.scheduler.max_model_len - 1) > computed
            if has_tokens and not is_certain_to_finish and id(request) not in prefills:
                return True
        return False

    def _show_admitted(self) -> dict[str, Admission]:
        """Show the scheduler the requests that it may admit; return why others may not be."""
        refusals: dict[str, Admission] = {}
        for name in self.answers.queues_in_turn():
            held = self.holdback.waiting[name]
            not_ready: list[Request] = []
            try:
                while held:
                    request = held.peek_request()
                    if not self._is_literal and not self.answers.is_ready(request):
                        refusals[request.request_id] = Admission.BLOCKED
                        not_ready.append(held.pop_request())
                        continue
                    verdict = self.can_schedule(request)
                    if not verdict:
                        refusals[request.request_id] = verdict
                        return refusals
                    self.holdback.show(name)
            finally:
                prepend(held, not_ready)
        return refusals

    def _separate_phases(self) -> bool:
        """Hide the running requests that may not share a step with the others.

        Returns whether decodes run beside a request that adds no prefill.
        """
        running, prefills = self.scheduler.running, self._prefills()
        if prefills and not self.is_decode_turn:
            self.holdback.hide_running(prefills)
        elif self.holdback.num_shown():
            if all(map(self.answers.adds_no_prefill, self.holdback.shown())):
                return True
            self.holdback.hide_running([])
        else:
            prefill_ids = set(map(id, prefills))
            decodes = [r for r in running if id(r) not in prefill_ids] if prefills else running
            self.holdback.hide_running(self.turns.decodes_of_a_step(decodes))
        return False

    def _finish_step(self, output: SchedulerOutput, refusals: dict[str, Admission]) -> None:
        """Pad the step's counts and take note of it. All that can fail comes first."""
        requests = self.scheduler.requests
        padded, kind = padded_counts(output, requests, self.prefill_buckets, self._phase_test)
        running = self.scheduler.running
        if self.holdback.running:
            running = running + self.holdback.running
        state = _ACTIVE[kind] if kind != "empty" else self._state_after_nothing(running)
        if len(requests) > len(running):
            self._note_refusals(refusals)
        else:
            self.refusals = {}
        output.num_scheduled_tokens_padded, output.step_kind = padded, kind
        self._step_state = state
        if kind == "prefill":
            self.total_padding_tokens += sum(padded.values()) - output.total_num_scheduled_tokens
            self.turns.note_prefill(len(running))
        elif kind == "decode":
            self.turns.note_decode()
        else:
            is_paused = self.scheduler._pause_state == PauseState.PAUSED_ALL
            is_stuck = bool(self.holdback.running) and not is_paused
            self.turns.note_empty(is_stuck and not self._is_literal)

    def _note_refusals(self, refusals: dict[str, Admission]) -> None:
        """Count why each waiting request waits, but for those that the scheduler counts itself."""
        stop, counts = self.answers.reason_of_stop(), self.scheduler.admission_counts
        shown = [request.request_id for request in self.holdback.shown()]
        if stop is None:
            stop = Admission.NOT_SCHEDULED
            counts[stop] += len(shown)
        self.refusals = refusals | dict.fromkeys(shown, stop)
        for verdict in refusals.values():
            counts[verdict] += 1
        counts[Admission.BEHIND] += self.holdback.num_waiting() - len(refusals)

    def _state_after_nothing(self, running: list[Request]) -> SchedulerState:
        if self._is_literal:
            is_waiting = self.holdback.num_shown() or self.holdback.num_waiting()
            return self._step_state if running or is_waiting else SchedulerState.IDLE
        if prefills_of(running, self._phase_test):
            return SchedulerState.ACTIVE_PREFILL
        return SchedulerState.ACTIVE_DECODE if running else SchedulerState.IDLE

    def _prefills(self) -> list[Request]:
        return prefills_of(self.scheduler.running, self._phase_test)
