"""Every reachable state of one small Neuron scheduler: breadth first, each state once.

The world around the scheduler is adversarial: a request of any allowed size may arrive at any
moment, any request may be aborted at any moment (with steps in flight), a step may be scheduled
or the oldest output delivered in any order that the engine's queue depth allows, and each sampled
token may or may not end its request. States are equal when they can only lead to equal futures:
request names, physical block ids and pure statistics do not count.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from .. import (
    IntegrityError,
    NeuronAsyncScheduler,
    NeuronPolicy,
    NeuronScheduler,
    Request,
    RequestError,
    SchedulerConfig,
    SchedulerOutput,
)
from ..policy import check_schedulable
from .audit import Audit
from .clone import Cloner
from .records import InvariantError
from .subject import Subject

TOKEN, END = 1, 2

CLONER = Cloner(SchedulerConfig, NeuronPolicy, SchedulerOutput, Subject)

Action = tuple[Any, ...]


@dataclass(frozen=True)
class World:
    """One configuration and everything that may happen to it.

    sizes: (prompt tokens, max_tokens, text) of the requests that may arrive; prompts of one text
    are prefixes of each other. num_requests: how many arrive in all.
    """

    subject: Subject
    config: SchedulerConfig
    policy: NeuronPolicy
    sizes: tuple[tuple[int, int, int], ...]
    num_requests: int
    aborts: bool = True

    def start(self) -> "Situation":
        """Nothing has arrived yet."""
        return Situation(Audit(self.subject, self.config, asdict(self.policy), patience=1))


@dataclass
class Situation:
    """A scheduler with its judge, and what arrived: how many requests, of which sizes."""

    audit: Audit
    arrived: int = 0
    num_steps: int = 0
    size_of: dict[str, int] = field(default_factory=dict)


@dataclass
class Exploration:
    """Result of one world: numbers of states and transitions, the first violation and its path."""

    num_states: int = 0
    num_transitions: int = 0
    violation: str | None = None
    path: list[Action] = field(default_factory=list)


def actions(world: World, now: Situation) -> Iterator[Action]:
    """All that may happen next."""
    pending, live = now.audit.pending, now.audit.ledger.live
    if now.arrived < world.num_requests:
        yield from (("add", f"r{now.arrived}", index) for index in range(len(world.sizes)))
    if world.aborts:
        yield from (("abort", name) for name in live)
    if len(pending) < world.subject.depth and not now.audit.is_idle():
        yield ("schedule",)
    if pending:
        entries = pending[min(pending)]
        samplers = [name for name, is_chunk, _ in entries if not is_chunk and name in live]
        for ends in product((False, True), repeat=len(samplers)):
            yield ("deliver", tuple(name for name, end in zip(samplers, ends, strict=True) if end))


def perform(world: World, now: Situation, action: Action) -> bool:
    """Change `now`; False if nothing came of it. InvariantError if a rule is broken."""
    audit = now.audit
    match action:
        case ("add", name, index):
            return _add(world, now, name, index)
        case ("abort", name):
            audit.perform(["abort", [name]])
        case ("schedule",):
            audit.schedule(now.num_steps)
            if not audit.pending[now.num_steps]:
                audit.update(now.num_steps, {})  # an empty step computes nothing
            now.num_steps += 1
        case ("deliver", ends):
            step = min(audit.pending)
            audit.update(
                step,
                {
                    name: [] if is_chunk else [END if name in ends else TOKEN]
                    for name, is_chunk, _ in audit.pending[step]
                },
            )
    return True


def _add(world: World, now: Situation, name: str, index: int) -> bool:
    prompt, max_tokens, text = world.sizes[index]
    tokens = [text * 10 + TOKEN] * prompt
    request = Request(name, tokens, max_tokens)
    try:
        # A request that cannot be served even alone is no fault of the rules: it does not arrive.
        check_schedulable(request, world.config, asynchronous=world.subject.depth > 1)
    except RequestError:
        return False
    now.audit.perform(["add", {"id": name, "prompt": tokens, "max_tokens": max_tokens}])
    now.arrived += 1
    now.size_of[name] = index
    return True


def key_of(world: World, now: Situation) -> tuple[Any, ...]:
    """Equal keys mean equal futures."""
    scheduler = now.audit.scheduler
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
            tuple((index[name], is_chunk) for name, is_chunk, _ in entries if name in index)
            for entries in now.audit.pending.values()
        ),
        scheduler.rules.turns.key(),
        now.audit.ledger.neuron and now.audit.ledger.neuron.key(),
        _blocks_key(world, scheduler),
        _own_key(world.subject.cls, scheduler, index),
    )


_BASE_FIELDS: dict[type, frozenset[str]] = {}


def _own_key(cls: type, scheduler: NeuronScheduler, index: dict[str, int]) -> Any:
    """What a class keeps beside the attributes of ours, with requests by their place."""
    if cls in (NeuronScheduler, NeuronAsyncScheduler):
        return ()
    if cls not in _BASE_FIELDS:
        known = [vars(base(scheduler.config)) for base in (NeuronScheduler, NeuronAsyncScheduler)]
        _BASE_FIELDS[cls] = frozenset().union(*known)
    return _canonical(
        {k: v for k, v in vars(scheduler).items() if k not in _BASE_FIELDS[cls]}, index
    )


def _canonical(value: Any, index: dict[str, int]) -> Any:
    if isinstance(value, Request):
        value = value.request_id
    if isinstance(value, str):
        return index.get(value, value)
    if isinstance(value, dict):
        return tuple((_canonical(k, index), _canonical(v, index)) for k, v in value.items())
    if isinstance(value, list | tuple | deque):
        return tuple(_canonical(item, index) for item in value)
    if isinstance(value, set | frozenset):
        return frozenset(_canonical(item, index) for item in value)
    if hasattr(value, "__dict__"):
        return type(value).__name__, _canonical(vars(value), index)
    return value


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
    live = now.audit.ledger.live.values()
    tokens = sum(record.computed + len(record.tokens) for record in live)
    gone = 1_000 * (now.arrived - len(live))
    return 2 * (tokens + gone) - len(now.audit.pending)


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
        rank = rank_of(now), len(now.audit.pending)
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
                    after.audit.scheduler.check_integrity()
                    origin[reached] = (key, action)
                    todo.append((reached, after))
            except (InvariantError, IntegrityError, RuntimeError) as error:
                name = "" if isinstance(error, InvariantError) else f"{type(error).__name__}: "
                result.violation = f"{name}{error}"
                result.path = [*_path_to(origin, key), action]
                return result
        if max_states is not None and result.num_states >= max_states:
            raise MemoryError(f"max_states={max_states}: the world has more")
    return result


def _check_progress(before: tuple[int, int], after: Situation, action: Action) -> None:
    rank, num_in_flight = before
    is_step = action[0] == "deliver" or len(after.audit.pending) > num_in_flight
    if is_step and rank_of(after) <= rank:
        raise InvariantError("a livelock: a step of the engine makes no progress")


def _path_to(origin: dict[Any, tuple[Any, Action] | None], key: Any) -> list[Action]:
    path: list[Action] = []
    while (link := origin[key]) is not None:
        key, action = link
        path.append(action)
    return path[::-1]
