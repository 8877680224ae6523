"""Admission control of the Neuron layer: who may start its prefill, and why others wait."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .admission import Admission
from .pause_state import PauseState
from .policy import NeuronPolicy, prefills_of
from .request import Request

if TYPE_CHECKING:
    from .scheduler import Scheduler as _BaseScheduler
else:
    # At run time the base is whatever stands behind this class in the method resolution order.
    _BaseScheduler = object


class AdmissionControl(_BaseScheduler):
    """Decides over waiting requests by what is running and what the KV cache can hold.

    The class that combines it with a base scheduler calls `_init_admission` after the base's
    `__init__` and answers the questions to the base.
    """

    max_prefills_per_batch = 1
    waiting_queue_names: tuple[str, ...] = ("waiting",)
    """Attributes of the base that queue requests to be run, in the order it looks at them."""

    def _init_admission(self, neuron_policy: NeuronPolicy, num_blocks: int) -> None:
        """`num_blocks` includes the null block."""
        self.neuron_policy = neuron_policy
        self.num_usable_blocks = num_blocks - 1
        if neuron_policy.usable_blocks_only:
            self.max_kv_concurrent = max(1, self._max_concurrency(num_blocks - 1))
        else:
            self.max_kv_concurrent = self._max_concurrency(num_blocks) or self.max_num_running_reqs
        if not neuron_policy.hold_back_skipped_waiting:
            self.waiting_queue_names = ("waiting",)
        self._refusals: dict[str, Admission] = {}
        self._decode_turn = False

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

    # Answers.

    @property
    def at_capacity(self) -> bool:
        """Whether max_num_seqs requests are running."""
        return len(self.running) >= self.max_num_running_reqs

    @property
    def has_prefill_in_running(self) -> bool:
        """Whether a running request is in its prefill phase."""
        return bool(prefills_of(self.running, self.neuron_policy.phase_test))

    def can_schedule(self, request: Request) -> Admission:
        """Whether the step that is being scheduled may admit `request`, or why not.

        Asked while the waiting queues hold only what this step admits already.
        """
        if not self.neuron_policy.admit_while_paused and not self._may_admit(request):
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

    def _note_refusals(
        self, refusals: dict[str, Admission], num_held: int, not_scheduled: list[str]
    ) -> None:
        """Count why the `num_held` requests that the base could not see were held back.

        Those in `not_scheduled` it could see; it counts them itself.
        """
        self._refusals = refusals | dict.fromkeys(not_scheduled, self._base_stop())
        for verdict in refusals.values():
            self.admission_counts[verdict] += 1
        self.admission_counts[Admission.BEHIND] += num_held - len(refusals)

    def _num_waiting(self) -> int:
        return sum(len(getattr(self, name)) for name in self.waiting_queue_names)

    def _kv_cache_has_room(self, request: Request) -> bool:
        """Whether `request` can run to its end beside the running ones, whatever they need."""
        others = self.running
        if self.neuron_policy.usable_blocks_only:
            others = [*others, *(r for r in self._waiting_with_blocks() if r is not request)]
        if self.neuron_policy.kv_admission == "worst_case":
            return len(others) < self.max_kv_concurrent
        needed = sum(map(self._num_blocks_needed, (*others, request)))
        return needed <= self.num_usable_blocks
