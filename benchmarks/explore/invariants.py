"""What every step of a Neuron scheduler must keep, stated without its code.

Each function looks at a scheduler before or after one step and returns what is broken, as a
sentence, or None.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from segattn.reference.paging import NULL_BLOCK_ID
from segattn.scheduler import NeuronScheduler, SchedulerConfig, SchedulerOutput


@dataclass(frozen=True)
class Before:
    """What a step must be judged against: taken before it is scheduled.

    computed, known: computed and known tokens of each live request; prompts: prompt lengths.
    waiting: ids in queue order. unfinished: whether something could run.
    """

    computed: Mapping[str, int]
    known: Mapping[str, int]
    prompts: Mapping[str, int]
    waiting: Sequence[str]
    unfinished: bool

    @classmethod
    def of(cls, scheduler: NeuronScheduler) -> "Before":
        """The state of a scheduler now."""
        requests = scheduler.requests
        return cls(
            {name: request.num_computed_tokens for name, request in requests.items()},
            {name: request.num_tokens for name, request in requests.items()},
            {name: request.num_prompt_tokens for name, request in requests.items()},
            [request.request_id for request in scheduler.waiting],
            scheduler.get_num_unfinished_requests() > 0,
        )


def prefills_of(before: Before, output: SchedulerOutput) -> list[str]:
    """Scheduled requests with prompt or lost outputs left to compute before their newest token."""
    computed = dict(before.computed)
    computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [
        name
        for name in output.num_scheduled_tokens
        if computed[name] < max(before.prompts[name], before.known[name] - 1)
    ]


def broken_step_rules(
    before: Before, output: SchedulerOutput, config: SchedulerConfig
) -> Iterator[str]:
    """Rules that this step broke."""
    prefills = prefills_of(before, output)
    scheduled = output.num_scheduled_tokens
    if prefills and len(scheduled) > len(prefills):
        yield f"a mixed batch: {scheduled}, of which {prefills} are prefills"
    if len(prefills) > 1:
        yield f"more than one prefill in a step: {prefills}"
    if output.preempted_req_ids:
        yield f"a preemption: {sorted(output.preempted_req_ids)}"
    resumed = output.scheduled_cached_reqs.resumed_req_ids
    admitted = [
        name
        for name in scheduled
        if name in resumed or any(name == new.req_id for new in output.scheduled_new_reqs)
    ]
    if admitted != list(before.waiting[: len(admitted)]):
        yield f"admission out of turn: {admitted} of the queue {list(before.waiting)}"
    for name, count in scheduled.items():
        padded = (output.num_scheduled_tokens_padded or {}).get(name)
        fitting = [bucket for bucket in config.prefill_buckets if bucket >= count]
        if padded != (min(fitting) if name in prefills else count):
            yield f"{name}: {count} tokens padded to {padded}, buckets {config.prefill_buckets}"
    if not 0 <= sum(scheduled.values()) <= config.step_token_budget:
        yield f"a step of {scheduled}: more than {config.step_token_budget} tokens"


def broken_block_rules(scheduler: NeuronScheduler, config: SchedulerConfig) -> Iterator[str]:
    """Blocks that leaked or have the wrong owners, now."""
    free = list(scheduler.kv_cache_manager.block_pool.free)
    tables = {name: request.block_ids for name, request in scheduler.requests.items()}
    owned = [block for table in tables.values() for block in table]
    blocks = sorted({*owned, *free})
    if blocks != [block for block in range(config.num_blocks) if block != NULL_BLOCK_ID]:
        yield f"blocks lost or invented: owned {tables}, free {free}"
    if len(free) != len(set(free)) or set(free) & set(owned):
        yield f"a block is free twice or free and owned: owned {tables}, free {free}"
    if len(owned) != len(set(owned)):
        yield from _wrongly_shared(scheduler, config)
    for name, table in tables.items():
        if len(table) != len(set(table)):
            yield f"{name} owns a block twice: {table}"
    for request in scheduler.running:
        if len(request.block_ids) * config.block_size < request.num_computed_tokens:
            yield f"{request.request_id} computes beyond its blocks: {tables}"


def _wrongly_shared(scheduler: NeuronScheduler, config: SchedulerConfig) -> Iterator[str]:
    """Blocks whose owners do not all hold the same prefix up to the block's end."""
    content: dict[int, list[int]] = {}
    for request in scheduler.requests.values():
        tokens = request.all_token_ids
        for place, block in enumerate(request.block_ids, start=1):
            prefix = tokens[: place * config.block_size]
            if block not in content:
                content[block] = prefix
                continue
            is_full = len(prefix) == place * config.block_size
            if not (config.enable_prefix_caching and is_full and content[block] == prefix):
                yield f"block {block} has two owners that do not share its prefix"
