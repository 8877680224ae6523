"""The live requests of a scheduler and the queues they stand in."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import count
from operator import attrgetter

from .config import SchedulerConfig
from .errors import RequestError
from .kv_cache_manager import KVCacheManager
from .output import SchedulerOutput
from .pause_state import PauseState
from .prefix_digests import PrefixDigests
from .request import Request, RequestStatus
from .request_queue import RequestQueue, create_request_queue
from .transaction import Transaction
from .validation import check_kind, check_request


@dataclass(slots=True)
class InFlight:
    """A step that was scheduled and has not come back."""

    output: SchedulerOutput
    requests: list[Request]
    resumed: set[str]
    newly_cached: list[tuple[int, PrefixDigests]]
    num_placeholders: dict[str, int]


class RequestPool:
    """Requests from `add_request` to their end: all that a scheduler keeps between its steps."""

    def __init__(self, config: SchedulerConfig) -> None:
        check_kind("config", config, SchedulerConfig)
        self.config = config
        self.policy = config.policy
        self.max_num_running_reqs = config.max_num_seqs
        self.max_model_len = config.max_model_len
        self.block_size = config.block_size
        self.num_spec_tokens = config.num_speculative_tokens

        self._transaction = Transaction()
        self.kv_cache_manager = KVCacheManager(config, self._transaction)
        self.requests: dict[str, Request] = {}
        """Live requests in the order in which they were added."""
        self.waiting: RequestQueue = create_request_queue(config.policy)
        self.running: list[Request] = []
        self.finished_req_ids: set[str] = set()
        """Requests finished since the latest step; the next one reports them."""
        self._sequence_numbers = count()
        self._pause_state = PauseState.UNPAUSED
        self._previously_scheduled: set[str] = set()
        self._in_flight: list[InFlight] = []
        self._preempted_before: set[str] = set()
        self._told_anew: set[str] = set()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken, those that only the prefix cache holds included."""
        return self.kv_cache_manager.block_pool.num_free_blocks

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Stop admitting or scheduling, or go on."""
        self._pause_state = PauseState(pause_state)

    def add_request(self, request: Request) -> None:
        """Queue a request. RequestError, nothing queued, when it is malformed or its id lives."""
        packed_prompt = check_request(request)
        if request.request_id in self.requests:
            raise RequestError(request.request_id, "a request of this id is not finished yet")
        request.max_num_tokens = min(
            request.num_prompt_tokens + request.max_tokens, self.max_model_len
        )
        self.kv_cache_manager.hash_prompt(request, packed_prompt)
        request.sequence_number = next(self._sequence_numbers)
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def finish_requests(
        self, request_ids: str | Iterable[str], finished_status: RequestStatus
    ) -> list[str]:
        """End requests from outside, for example because a client went away.

        Their blocks are free at once, even while a step computes them. Returns the ids really
        finished, in the order given: unknown and finished ones are ignored.
        """
        if not (isinstance(finished_status, RequestStatus) and finished_status.is_finished):
            raise ValueError(f"finished_status={finished_status!r}: must be a finished status")
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        check_kind("request_ids", request_ids, Iterable)
        ended = [
            request_id for request_id in dict.fromkeys(request_ids) if request_id in self.requests
        ]
        requests = [self.requests[request_id] for request_id in ended]
        with self._transaction:
            for request in requests:
                self._end(request, finished_status)
            self._forget(requests)
            return ended

    def get_num_unfinished_requests(self) -> int:
        """Requests that the pause state lets go on."""
        if self._pause_state is PauseState.PAUSED_ALL:
            return 0
        if self._pause_state is PauseState.PAUSED_NEW:
            return len(self.running)
        return len(self.waiting) + len(self.running)

    def has_requests(self) -> bool:
        """Whether another step is due: for unfinished requests or to report finished ones."""
        return bool(self.get_num_unfinished_requests() or self.finished_req_ids)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes, for example after a change of weights.

        False, nothing changed, while requests own blocks, unless `reset_running_requests`: then
        these are preempted, and tokens of theirs that are still in flight will be dropped.
        """
        check_kind("reset_running_requests", reset_running_requests, bool)
        with self._transaction:
            if reset_running_requests:
                self._record_running()
                self._transaction.record(
                    (setattr, self, "_previously_scheduled", self._previously_scheduled)
                )
                # From the end, so that the queue starts with the running order.
                while self.running:
                    request = self.running.pop()
                    self._preempt(request)
                    if not self.num_spec_tokens:
                        # As in vLLM 0.24, which overwrites the count of an earlier reset.
                        request.async_tokens_to_discard = 0
                    request.async_tokens_to_discard += request.num_output_placeholders
                    request.num_output_placeholders = 0
                self._previously_scheduled = set()
            return self.kv_cache_manager.reset_prefix_cache()

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks and queue it again; the caller took it out of `running`.

        Placeholders stay, as in vLLM 0.24: the tokens in flight still arrive.
        """
        self._record_request(request)
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self._transaction.record((_take_back, self.waiting, request))
        self.waiting.prepend_request(request)

    def _end(self, request: Request, status: RequestStatus) -> None:
        """Finish a request and free its blocks; `_forget` takes it out of its queue."""
        self._record_request(request)
        self.kv_cache_manager.free(request)
        request.status = status
        finished = self.finished_req_ids
        # An id that was used again may end twice before a step reports it.
        if request.request_id not in finished:
            self._transaction.record((finished.discard, request.request_id))
            finished.add(request.request_id)

    def _forget(self, ended: Collection[Request]) -> None:
        """Take ended requests out of the queues."""
        if not ended:
            return
        gone = set(ended)
        self._transaction.record((self._remember, self.running, self.waiting, ended))
        running = [request for request in self.running if request not in gone]
        waiting = self.waiting
        if len(self.running) - len(running) < len(gone):
            waiting = waiting.without(gone)
        self.running, self.waiting = running, waiting
        for request in gone:
            del self.requests[request.request_id]

    def _remember(
        self, running: list[Request], waiting: RequestQueue, ended: Iterable[Request]
    ) -> None:
        """Undo `_forget`."""
        self.running, self.waiting = running, waiting
        lost = [request for request in ended if request.request_id not in self.requests]
        if lost:
            every = sorted([*self.requests.values(), *lost], key=attrgetter("sequence_number"))
            self.requests.clear()
            self.requests.update((request.request_id, request) for request in every)

    def _record_request(self, request: Request) -> None:
        """Let the transaction restore a request that is about to change, its tokens excepted."""
        self._transaction.record(
            (
                _restore_request,
                request,
                request.status,
                request.stop_reason,
                request.num_computed_tokens,
                request.num_output_placeholders,
                request.async_tokens_to_discard,
                request.num_preemptions,
                request.spec_token_ids,
            )
        )

    def _record_running(self) -> None:
        """Let the transaction restore the running list."""
        self._transaction.record((self._restore_running, self.running, self.running.copy()))

    def _restore_running(self, running: list[Request], requests: list[Request]) -> None:
        running[:] = requests
        self.running = running


def _restore_request(
    request: Request,
    status: RequestStatus,
    stop_reason: int | None,
    num_computed_tokens: int,
    num_output_placeholders: int,
    async_tokens_to_discard: int,
    num_preemptions: int,
    spec_token_ids: list[int],
) -> None:
    request.status = status
    request.stop_reason = stop_reason
    request.num_computed_tokens = num_computed_tokens
    request.num_output_placeholders = num_output_placeholders
    request.async_tokens_to_discard = async_tokens_to_discard
    request.num_preemptions = num_preemptions
    request.spec_token_ids = spec_token_ids


def _take_back(queue: RequestQueue, request: Request) -> None:
    if request in queue:
        queue.remove_request(request)
