"""Random workloads on small caches: integrity after every call, and each request's own text."""

from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from segattn.scheduler import (
    AsyncScheduler,
    DraftTokenIds,
    ModelRunnerOutput,
    NeuronAsyncScheduler,
    NeuronScheduler,
    PauseState,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)

KINDS: list[type[Scheduler]] = [Scheduler, AsyncScheduler, NeuronScheduler, NeuronAsyncScheduler]
MAX_MODEL_LEN = 12


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    block_size = draw(st.integers(1, 4))
    max_num_seqs = draw(st.integers(1, 4))
    is_chunked = draw(st.booleans())
    smallest_budget = max_num_seqs if is_chunked else MAX_MODEL_LEN
    # Every request fits alone, and little more.
    num_blocks_alone = -(-MAX_MODEL_LEN // block_size)
    return SchedulerConfig(
        max_num_seqs,
        draw(st.integers(smallest_budget, MAX_MODEL_LEN + 4)),
        MAX_MODEL_LEN,
        block_size,
        1 + num_blocks_alone + draw(st.integers(0, 6)),
        enable_prefix_caching=draw(st.booleans()),
        enable_chunked_prefill=is_chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3])) if is_chunked else 0,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        scheduler_reserve_full_isl=draw(st.booleans()),
        num_speculative_tokens=2,
    )


requests = st.fixed_dictionaries(
    {
        # Two tokens and few lengths: prefixes are shared all the time.
        "prompt_token_ids": st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MODEL_LEN - 2),
        "max_tokens": st.integers(1, 6),
        "priority": st.integers(0, 2),
        "arrival_time": st.integers(0, 2),
        "cache_salt": st.sampled_from([None, None, "salt"]),
        "skip_reading_prefix_cache": st.sampled_from([False, False, True]),
    }
)

actions = st.one_of(
    st.tuples(st.just("add"), requests),
    st.tuples(st.just("step"), st.integers(0, 2)),
    st.tuples(st.just("step"), st.integers(0, 2)),
    st.tuples(st.just("abort"), st.integers(0, 3)),
    st.tuples(st.just("reset"), st.booleans()),
    st.tuples(st.just("pause"), st.sampled_from(PauseState)),
)


def token_at(request: Request, position: int) -> int:
    """The text of a request depends on its name and the position alone."""
    return 10 + (position * 7 + len(request.request_id) * 3) % 5


class Loop:
    """An engine loop with a model that knows each request's text."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.depth = 2 if isinstance(scheduler, AsyncScheduler) else 1
        self.in_flight: deque[tuple[SchedulerOutput, set[str]]] = deque()
        self.ended: list[Request] = []
        self.added = 0

    def add(self, given: dict[str, Any]) -> None:
        request = Request("r" * (self.added + 1), **given)
        self.added += 1
        self.ended.append(request)
        self.scheduler.add_request(request)

    def step(self, num_right_drafts: int) -> bool:
        """Schedule, deliver the oldest step if enough are in flight; whether tokens moved."""
        output = self.scheduler.schedule()
        samples = {
            name
            for name in output.num_scheduled_tokens
            if not self.scheduler.requests[name].is_prefill_chunk
        }
        self.in_flight.append((output, samples))
        self.scheduler.check_integrity()
        moved = bool(output.num_scheduled_tokens)
        if len(self.in_flight) == self.depth:
            output, samples = self.in_flight.popleft()
            moved |= bool(samples)
            names = list(output.num_scheduled_tokens)
            tokens = [self.sample(output, name, num_right_drafts, samples) for name in names]
            self.scheduler.update_from_output(output, ModelRunnerOutput(names, tokens))
            if self.depth == 1:
                self.propose(num_right_drafts)
        return moved

    def sample(
        self, output: SchedulerOutput, name: str, num_right_drafts: int, samples: set[str]
    ) -> list[int]:
        """The next tokens of a request when its step is delivered."""
        request = self.scheduler.requests.get(name)
        if request is None or name not in samples:
            return []
        num_drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
        num_tokens = 1 + min(num_right_drafts, num_drafts)
        return [token_at(request, request.num_tokens + i) for i in range(num_tokens)]

    def propose(self, num_drafts: int) -> None:
        names = [request.request_id for request in self.scheduler.running]
        drafts = [
            [token_at(request, request.num_tokens + i) for i in range(num_drafts)]
            for request in self.scheduler.running
        ]
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))


@given(st.sampled_from(KINDS), configs(), st.lists(actions, max_size=25))
def test_integrity_holds_and_every_request_gets_its_own_text(
    kind: type[Scheduler], config: SchedulerConfig, steps: list[tuple[str, Any]]
) -> None:
    scheduler = kind(config)
    loop = Loop(scheduler)
    for action, argument in steps:
        match action:
            case "add":
                loop.add(argument)
            case "step":
                loop.step(argument)
            case "abort":
                names = list(scheduler.requests)[argument : argument + 1]
                assert scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED) == names
            case "reset":
                scheduler.reset_prefix_cache(reset_running_requests=argument)
            case "pause":
                scheduler.set_pause_state(argument)
        scheduler.check_integrity()
    scheduler.set_pause_state(PauseState.UNPAUSED)
    num_idle = 0
    while scheduler.has_requests():
        num_idle = 0 if loop.step(0) else num_idle + 1
        assert num_idle <= 2, "no progress"
        scheduler.check_integrity()
    assert scheduler.num_free_blocks == config.num_blocks - 1
    for request in loop.ended:
        known = request.num_prompt_tokens
        expected = [token_at(request, known + i) for i in range(request.num_output_tokens)]
        assert request.output_token_ids == expected
        if request.status is not RequestStatus.FINISHED_ABORTED:
            assert request.num_tokens == request.max_num_tokens
