"""Every reachable state of one small scheduler: breadth first, each state once.

The world around the scheduler is adversarial: a request of any allowed size may arrive at any
moment, any request may be aborted at any moment (with steps in flight), a step may be scheduled
or the oldest output delivered in any order that the engine's queue depth allows, and each sampled
token may or may not end its request. States are equal when they can only lead to equal futures:
request names, physical block ids and pure statistics do not count.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from segattn.benchmarks.explore.clone import Cloner
from segattn.benchmarks.explore.invariants import Before, broken_block_rules, broken_step_rules
from segattn.scheduler import (
    IntegrityError,
    ModelRunnerOutput,
    NeuronAsyncScheduler,
    NeuronPolicy,
    NeuronScheduler,
    Request,
    RequestError,
    RequestStatus,
    SchedulerConfig,
    SchedulerOutput,
)
from segattn.scheduler.policy import check_schedulable

TOKEN, END = 1, 2

CLONER = Cloner(SchedulerConfig, NeuronPolicy, SchedulerOutput)

Action = tuple[Any, ...]


@dataclass(frozen=True)
class World:
    """One configuration and everything that may happen to it.

    sizes: (prompt tokens, max_tokens, text) of the requests that may arrive; prompts of one text
    are prefixes of each other. num_requests: how many arrive in all. depth: steps in flight.
    """

    config: SchedulerConfig
    policy: NeuronPolicy
    sizes: tuple[tuple[int, int, int], ...]
    num_requests: int
    depth: int
    aborts: bool = True

    def start(self) -> "Situation":
        """Nothing has arrived yet."""
        kind = NeuronScheduler if self.depth == 1 else NeuronAsyncScheduler
        return Situation(kind(self.config, self.policy))


@dataclass
class Situation:
    """A scheduler, the steps in flight with what each request samples, and how many arrived."""

    scheduler: NeuronScheduler
    in_flight: list[tuple[SchedulerOutput, dict[str, bool]]] = field(default_factory=list)
    arrived: int = 0
    size_of: dict[str, int] = field(default_factory=dict)


class ViolationError(AssertionError):
    """A rule is broken; the message says which."""


@dataclass
class Exploration:
    """Result of one world: numbers of states and transitions, the first violation and its path."""

    num_states: int = 0
    num_transitions: int = 0
    violation: str | None = None
    path: list[Action] = field(default_factory=list)


def actions(world: World, now: Situation) -> Iterator[Action]:
    """All that may happen next."""
    scheduler = now.scheduler
    if now.arrived < world.num_requests:
        yield from (("add", f"r{now.arrived}", index) for index in range(len(world.sizes)))
    if world.aborts:
        yield from (("abort", name) for name in scheduler.requests)
    if len(now.in_flight) < world.depth and scheduler.has_requests():
        yield ("schedule",)
    if now.in_flight:
        samplers = [
            name
            for name, samples in now.in_flight[0][1].items()
            if samples and name in scheduler.requests
        ]
        for ends in product((False, True), repeat=len(samplers)):
            yield ("deliver", tuple(name for name, end in zip(samplers, ends, strict=True) if end))


def perform(world: World, now: Situation, action: Action) -> bool:
    """Change `now`; False if nothing came of it. ViolationError if a rule is broken."""
    match action:
        case ("add", name, index):
            return _add(world, now, name, index)
        case ("abort", name):
            now.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            return True
        case ("schedule",):
            return _schedule(world, now)
        case ("deliver", ends):
            _deliver(now, ends)
            return True
    raise ValueError(f"action={action}: no such action")


def _add(world: World, now: Situation, name: str, index: int) -> bool:
    prompt, max_tokens, text = world.sizes[index]
    tokens = [text * 10 + TOKEN] * prompt
    request = Request(name, tokens, max_tokens, eos_token_id=END)
    try:
        # A request that cannot be served even alone is no fault of the rules: it does not arrive.
        check_schedulable(request, world.config, asynchronous=world.depth > 1)
    except RequestError:
        return False
    now.scheduler.add_request(request)
    now.arrived += 1
    now.size_of[name] = index
    return True


def _schedule(world: World, now: Situation) -> bool:
    scheduler = now.scheduler
    before = Before.of(scheduler)
    try:
        output = scheduler.schedule()
    except RuntimeError as error:
        raise ViolationError(f"schedule raises {error}") from error
    for broken in broken_step_rules(before, output, world.config):
        raise ViolationError(broken)
    if not output.num_scheduled_tokens:
        if before.unfinished and not now.in_flight:
            raise ViolationError(
                f"a deadlock: nothing is in flight and nothing is scheduled, waiting "
                f"{before.waiting}, running {[r.request_id for r in scheduler.running]}"
            )
        return True
    samples = {
        name: not scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens
    }
    now.in_flight.append((output, samples))
    return True


def _deliver(now: Situation, ends: tuple[str, ...]) -> None:
    output, samples = now.in_flight.pop(0)
    names = list(output.num_scheduled_tokens)
    tokens = [[END if name in ends else TOKEN] if samples[name] else [] for name in names]
    now.scheduler.update_from_output(output, ModelRunnerOutput(names, tokens))


def key_of(world: World, now: Situation) -> tuple[Any, ...]:
    """Equal keys mean equal futures."""
    scheduler = now.scheduler
    requests = scheduler.requests
    index = {name: place for place, name in enumerate(requests)}
    return (
        now.arrived,
        tuple(
            (
                now.size_of[name],
                r.status.value,
                r.num_tokens,
                r.num_computed_tokens,
                r.num_output_placeholders,
                r.is_prefill_chunk,
                r.num_in_flight_tokens,
                r.num_stale_output_tokens,
                len(r.block_ids),
            )
            for name, r in requests.items()
        ),
        tuple(index[r.request_id] for r in scheduler.waiting),
        tuple(index[r.request_id] for r in scheduler.running),
        bool(scheduler.finished_req_ids),
        tuple(
            tuple((index[name], flag) for name, flag in samples.items() if name in index)
            for _, samples in now.in_flight
        ),
        scheduler.rules.turns.key(),
        _blocks_key(world, scheduler),
    )


def _blocks_key(world: World, scheduler: NeuronScheduler) -> tuple[Any, ...]:
    """Ownership, order and content of the blocks under canonical names.

    Without prefix caching no block differs from another, so their numbers say it all.
    """
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching:
        return (scheduler.num_free_blocks,)
    tables = [request.block_ids for request in scheduler.requests.values()]
    free = list(scheduler.kv_cache_manager.block_pool.free)
    names: dict[int, int] = {}
    for block in [*free, *(block for table in tables for block in table)]:
        names.setdefault(block, len(names))
    content = sorted(
        (digest, tuple(names[block] for block in blocks))
        for digest, blocks in manager.block_pool.blocks_by_digest().items()
    )
    cached = tuple(request.num_cached_blocks for request in scheduler.requests.values())
    return (
        len(free),
        tuple(tuple(names[block] for block in table) for table in tables),
        tuple(content),
        cached,
    )


def rank_of(now: Situation) -> int:
    """Grows with every step of the engine, so that no sequence of steps can come back.

    Counts computed and known tokens of live requests, more for those that are gone, and less for
    each output that is still in flight.
    """
    live = now.scheduler.requests.values()
    tokens = sum(r.num_computed_tokens + r.num_tokens for r in live)
    gone = 1_000 * (now.arrived - len(live))
    return 2 * (tokens + gone) - len(now.in_flight)


def explore(world: World, max_states: int | None = None) -> Exploration:
    """Walk all states of a world; stops at the first violation, which has a shortest path."""
    result = Exploration()
    start = world.start()
    origin: dict[Any, tuple[Any, Action] | None] = {key_of(world, start): None}
    todo = deque([(key_of(world, start), start)])
    while todo:
        key, now = todo.popleft()
        result.num_states += 1
        possible = list(actions(world, now))
        rank = rank_of(now), len(now.in_flight)
        for action in possible:
            # Nobody needs the situation itself after its last action.
            after: Situation = now if action is possible[-1] else CLONER.copy(now)
            result.num_transitions += 1
            try:
                if not perform(world, after, action):
                    continue
                _check_progress(rank, after, action)
                reached = key_of(world, after)
                if reached not in origin:
                    _check_blocks(world, after)
                    origin[reached] = (key, action)
                    todo.append((reached, after))
            except ViolationError as error:
                result.violation = str(error)
                result.path = [*_path_to(origin, key), action]
                return result
        if max_states is not None and result.num_states >= max_states:
            raise MemoryError(f"max_states={max_states}: the world has more")
    return result


def _check_progress(before: tuple[int, int], after: Situation, action: Action) -> None:
    rank, num_in_flight = before
    is_step = action[0] == "deliver" or len(after.in_flight) > num_in_flight
    if is_step and rank_of(after) <= rank:
        raise ViolationError("a livelock: a step of the engine makes no progress")


def _check_blocks(world: World, now: Situation) -> None:
    for broken in broken_block_rules(now.scheduler, world.config):
        raise ViolationError(broken)
    try:
        now.scheduler.check_integrity()
    except IntegrityError as error:
        raise ViolationError(str(error)) from error


def _path_to(origin: dict[Any, tuple[Any, Action] | None], key: Any) -> list[Action]:
    path: list[Action] = []
    while (link := origin[key]) is not None:
        key, action = link
        path.append(action)
    return path[::-1]
