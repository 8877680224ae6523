"""The engine loop: requests in, scheduled steps through the model, completions out."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from logging import getLogger
from time import perf_counter

from ..kernels.shape_checks import BLOCK_SIZES, check_head_dim
from ..kernels.validation import check_choice
from ..scheduler import (
    DraftTokenIds,
    NeuronAsyncScheduler,
    NeuronPolicy,
    NeuronScheduler,
    Request,
    RequestError,
    RequestStatus,
    SchedulerConfig,
    SchedulerOutput,
)
from ..scheduler.policy import check_schedulable
from .compile_plan import CompilePlan
from .completion import Completion
from .launch import Launch, RowError, StepResult
from .llama import Llama
from .model_runner import ModelRunner
from .paged_cache import PagedKVCache
from .step import Step

logger = getLogger(__name__)

Propose = Callable[[Sequence[int], int], Sequence[int]]
"""(known tokens of a request, most drafts) -> drafts of the tokens that follow."""

_MOST_EMPTY_STEPS = 3
"""Steps in a row without a token, with nothing in flight, after which nothing will ever move."""


class _Flight:
    """A step from its scheduling to the delivery of its tokens."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.launched = started
        self.state = ""
        self.num_free_blocks = 0
        self.scheduled: SchedulerOutput | None = None
        self.launch: Launch | None = None


class Engine:
    """Serves requests on one model with the Neuron scheduler.

    `segattn.kernels` does every attention of every layer. With float32 weights the greedy tokens
    of a request do not depend on what else is served, on buckets, chunks, cache hits or drafts.

    A step that fails is taken back: its requests, and those of a step scheduled behind it, stand
    as before, and the engine goes on. Requests whose own rows cannot be computed end with
    `finish_reason` "error", and so do all requests of a step that fails twice in a row.
    """

    def __init__(
        self,
        model: Llama,
        config: SchedulerConfig,
        *,
        policy: NeuronPolicy | None = None,
        decode_context_length_buckets: Sequence[int] = (),
        kv_segment_size: int = 512,
        keep_logits: bool = False,
        async_scheduling: bool = False,
        propose: Propose | None = None,
    ) -> None:
        """Allocate the cache and derive the compile plan.

        `async_scheduling` decides and prepares a step while the one before it runs. `propose` makes
        the drafts, up to num_speculative_tokens for each request; they are verified in the next
        step. ValueError for a max_model_len beyond the model's positions, a block size or head size
        that the kernels do not take, a cache beyond memory, bad context-length buckets, and drafts
        with async_scheduling, which would have to be verified before the next step is prepared.
        """
        check_choice("block_size", config.block_size, BLOCK_SIZES)
        check_head_dim("the model's head_dim", model.config.head_dim)
        largest = model.config.max_position_embeddings
        if config.max_model_len > largest:
            raise ValueError(
                f"max_model_len={config.max_model_len}: must be at most {largest}, "
                "the number of positions of the model"
            )
        if async_scheduling and config.num_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens={config.num_speculative_tokens}: must be 0 with "
                "async_scheduling, drafts are verified before the next step is scheduled"
            )
        # First, because it is what a size beyond memory fails on at once.
        cache = PagedKVCache(model.config, config.num_blocks, config.block_size, model.dtype)
        self.config = config
        kind = NeuronAsyncScheduler if async_scheduling else NeuronScheduler
        self.scheduler = kind(config, policy or NeuronPolicy())
        self.plan = CompilePlan(config, decode_context_length_buckets=decode_context_length_buckets)
        self.runner = ModelRunner(
            model, self.plan, cache, kv_segment_size=kv_segment_size, asynchronous=async_scheduling
        )
        self.completions: dict[str, Completion] = {}
        """Every request ever taken, by id."""
        self._vocab_size = model.config.vocab_size
        self._keep_logits = keep_logits
        self._propose = propose
        self._depth = 2 if async_scheduling else 1
        self._flights: deque[_Flight] = deque()
        self._at_work: _Flight | None = None
        """The step that is being scheduled, started or delivered."""
        self._failed: set[str] | None = None
        """Requests of a step that failed, until a step succeeds."""
        self._num_empty_steps = 0
        self._num_steps = 0
        self._made_at = perf_counter()

    def add_request(self, request: Request) -> None:
        """Queue a request. RequestError, with nothing changed, for one that can never be served.

        Refused here: an id used before, an empty prompt, a token outside the vocabulary, a prompt
        of max_model_len or longer, a need of more blocks than the cache has, max_tokens < 1.
        """
        if request.request_id in self.completions:
            raise RequestError(request.request_id, "this id is already in use: ids must be unique")
        bad = [token for token in request.prompt_token_ids if not 0 <= token < self._vocab_size]
        if bad:
            raise RequestError(
                request.request_id,
                f"prompt token id {bad[0]}: must be within 0..{self._vocab_size - 1}",
            )
        check_schedulable(request, self.config, asynchronous=self._depth > 1)
        self.scheduler.add_request(request)
        self.completions[request.request_id] = Completion(request)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests with `finish_reason` "abort"; returns those that had not finished.

        A token of theirs that is being computed is dropped.
        """
        return self.scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED)

    def has_requests(self) -> bool:
        """Whether a further step has something to do."""
        return bool(self._flights or self.scheduler.has_requests())

    def step(self) -> Step | None:
        """Execute one step; with async_scheduling the next one is under way when this returns.

        None when there was nothing to compute, or when the step failed and was taken back, which is
        logged. Raises what is no Exception (KeyboardInterrupt), an exception of the scheduler that
        comes twice in a row, and RuntimeError when unfinished requests exist and no step schedules
        any; every request is then as it was before the step.
        """
        step = None
        try:
            while len(self._flights) < self._depth and self._launch():
                pass
            if self._flights:
                step = self._deliver()
        except BaseException as error:
            concerned = self._take_back(error)
            if not isinstance(error, Exception):
                raise
            self._go_on(concerned, error)
        if self._num_empty_steps >= _MOST_EMPTY_STEPS:
            self._num_empty_steps = 0
            reasons = {i: why.name for i, why in self.scheduler.waiting_reasons().items()}
            raise RuntimeError(f"no progress: nothing can be scheduled, waiting: {reasons}")
        return step

    def run(self) -> Iterator[Step]:
        """Step until every request is finished, yielding each executed step."""
        while self.has_requests():
            step = self.step()
            if step is not None:
                yield step

    def _launch(self) -> bool:
        """Schedule a step and start it; False when there is nothing for another one behind it."""
        if not self.scheduler.has_requests():
            return False
        flight = self._at_work = _Flight(perf_counter())
        self._flights.append(flight)
        # Once scheduled it is in flight: nothing that can fail comes between.
        flight.scheduled = self.scheduler.schedule()
        flight.state = self.scheduler.state.name
        flight.num_free_blocks = self.scheduler.num_free_blocks
        flight.launch = self.runner.submit(flight.scheduled)
        flight.launched = perf_counter()
        return bool(flight.scheduled.num_scheduled_tokens)

    def _deliver(self) -> Step | None:
        """Wait for the oldest step and hand its tokens to the scheduler."""
        flight = self._at_work = self._flights[0]
        scheduled, launch = flight.scheduled, flight.launch
        assert scheduled is not None
        assert launch is not None
        result = self.runner.collect(launch)
        if self._keep_logits:
            for req_id, logits in result.logits.items():
                completion = self.completions[req_id]
                completion.logits[len(completion.token_ids) :] = logits
        outputs = self.scheduler.update_from_output(scheduled, result.output)
        self._flights.popleft()
        self._failed = None
        if result.shape is None:
            idle = not self._flights and self.scheduler.get_num_unfinished_requests()
            self._num_empty_steps = self._num_empty_steps + 1 if idle else 0
            return None
        self._num_empty_steps = 0
        for new in scheduled.scheduled_new_reqs:
            self.completions[new.req_id].num_cached_tokens = new.num_computed_tokens
        for req_id in result.logits:
            # Drafts behind the token that ended the request, tokens that came too late.
            del self.completions[req_id].logits[len(self.completions[req_id].token_ids) :]
        if self._propose is not None:
            self._draft([output.request_id for output in outputs], scheduled)
        return self._record(flight, result, sum(len(output.new_token_ids) for output in outputs))

    def _draft(self, req_ids: Sequence[str], scheduled: SchedulerOutput) -> None:
        """Propose drafts for the next step."""
        assert self._propose is not None
        most = scheduled.num_spec_tokens_to_schedule
        requests = [self.scheduler.requests[i] for i in req_ids if i in self.scheduler.requests]
        drafts = [list(self._propose(request.all_token_ids, most))[:most] for request in requests]
        self.scheduler.update_draft_token_ids(
            DraftTokenIds([request.request_id for request in requests], drafts)
        )

    def _take_back(self, error: BaseException) -> set[str]:
        """Take back every step in flight, newest first; returns the requests of the failed one."""
        launches = [flight.launch for flight in self._flights if flight.launch is not None]
        self.runner.take_back(launches)
        failed, self._at_work = self._at_work, None
        for flight in self._flights:
            if flight.launch is not None and flight.launch.error is error:
                failed = flight
        while self._flights:
            newest = self._flights[-1]
            if newest.scheduled is not None:
                self.scheduler.step_failed(newest.scheduled, error)
            self._flights.pop()
        scheduled = None if failed is None else failed.scheduled
        return set() if scheduled is None else set(scheduled.num_scheduled_tokens)

    def _go_on(self, concerned: set[str], error: Exception) -> None:
        """Let every request try again, but not those that cannot be computed or failed before.

        Raises `error` when the scheduler failed twice in a row.
        """
        before, self._failed = self._failed, concerned
        is_second = before is not None and (concerned & before or not concerned | before)
        if isinstance(error, RowError):
            reasons = error.reasons
        else:
            reason = f"{type(error).__name__}: {error}"
            reasons = dict.fromkeys(concerned if is_second else (), reason)
        if is_second and not concerned:
            raise error
        logger.warning("step of %s failed, ending %s", sorted(concerned), reasons, exc_info=error)
        for req_id, reason in reasons.items():
            self.completions[req_id].error = reason
        self.scheduler.finish_requests(list(reasons), RequestStatus.FINISHED_ERROR)

    def _record(self, flight: _Flight, result: StepResult, num_new_tokens: int) -> Step:
        assert flight.scheduled is not None
        assert result.shape is not None
        step = Step(
            index=self._num_steps,
            state=flight.state,
            graph=result.shape.name,
            request_ids=tuple(flight.scheduled.num_scheduled_tokens),
            num_tokens=result.num_tokens,
            num_tokens_padded=result.shape.bucket * result.shape.num_queries,
            num_prior_tokens=result.num_prior_tokens,
            num_new_tokens=num_new_tokens,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_cache_usage=1 - flight.num_free_blocks / self.scheduler.num_usable_blocks,
            start_seconds=flight.started - self._made_at,
            prepare_seconds=flight.launched - flight.started,
            run_start_seconds=result.started - self._made_at,
            run_seconds=result.ended - result.started,
        )
        self._num_steps += 1
        return step
