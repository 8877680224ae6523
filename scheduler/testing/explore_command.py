"""Walk every reachable state of every small Neuron configuration.

Shows for the default policy and its options that no state deadlocks or livelocks, no batch is
mixed, no decode is preempted, no block leaks or has a wrong owner, admission keeps its order, a
step has at most one prefill and every padded count is the smallest bucket; with `--policy
documented` it prints the shortest way into a deadlock of the published design.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing import Pool

from ...reference.paging import default_buckets, num_blocks_for
from ...reference.processes import end_with_parent
from ...reference.terminal import phase
from .. import NeuronPolicy, NeuronScheduler, SchedulerConfig
from .command import add_subject_arguments, subject_of
from .explorer import Action, Exploration, World, explore, perform
from .subject import Subject

POLICIES = {
    "default": tuple(
        NeuronPolicy(max_consecutive_prefills=limit, kv_admission=admission)
        for limit in (None, 1)
        for admission in ("shared", "worst_case", "reserved")
    ),
    "documented": (NeuronPolicy.documented(),),
}


@dataclass(frozen=True)
class Size:
    """Upper bounds of the configurations: all smaller ones are walked too."""

    num_requests: int
    max_model_len: int
    block_size: int


def request_sizes(max_model_len: int, num_texts: int) -> tuple[tuple[int, int, int], ...]:
    """Every (prompt, max_tokens, text) that a model of this length can serve differently."""
    return tuple(
        (prompt, max_tokens, text)
        for text in range(num_texts)
        for prompt in range(1, max_model_len)
        for max_tokens in range(1, max_model_len - prompt + 2)
    )


OWN = (Subject.own("neuron"), Subject.own("neuron_async"))


def worlds(
    size: Size, policies: Sequence[NeuronPolicy], subjects: Sequence[Subject] = OWN
) -> Iterator[World]:
    """Every configuration within `size`, small ones first, for every scheduler.

    Requests share prefixes of two texts where prefixes are cached. A budget above max_model_len
    and blocks beyond what all requests can fill change nothing, so they are left out.
    """
    for length in range(2, size.max_model_len + 1):
        for block_size, num_blocks in product(
            range(min(size.block_size, length), 0, -1), range(2, 2 + size.num_requests * length)
        ):
            if num_blocks > 1 + size.num_requests * num_blocks_for(length, block_size):
                continue
            for num_seqs, caching, policy, subject in product(
                range(1, size.num_requests + 1), (False, True), policies, subjects
            ):
                for budget in range(num_seqs, max(length, num_seqs) + 1):
                    yield World(
                        subject,
                        SchedulerConfig(
                            num_seqs,
                            budget,
                            length,
                            block_size,
                            num_blocks,
                            enable_prefix_caching=caching,
                            num_batched_tokens_buckets=default_buckets(min(budget, length), 1),
                        ),
                        policy,
                        request_sizes(length, 2 if caching else 1),
                        size.num_requests,
                    )


def describe_path(world: World, path: Sequence[Action]) -> Iterator[str]:
    """The actions of a path, one line each, with what every step schedules."""
    now = world.start()
    for place, action in enumerate(path, start=1):
        is_last = place == len(path)
        name, *given = action
        if not is_last:
            perform(world, now, action)
        match name:
            case "add":
                prompt, max_tokens, _ = world.sizes[given[1]]
                yield f"add {given[0]}: prompt of {prompt} tokens, max_tokens={max_tokens}"
            case "abort":
                yield f"abort {given[0]}"
            case "deliver":
                ends = f", ending {', '.join(given[0])}" if given[0] else ""
                yield f"deliver the output of the oldest step{ends}"
            case "schedule":
                yield "schedule" if is_last else f"schedule: {_latest_step(now.audit.pending)}"


def _latest_step(pending: Mapping[int, Sequence[tuple[str, bool, int]]]) -> str:
    return ", ".join(name for name, *_ in pending[max(pending)]) if pending else "nothing"


def report_violation(world: World, found: Exploration) -> None:
    """Print the configuration, the rule that is broken and the way to it."""
    config = world.config
    print(f"violation: {found.violation}")
    print(
        f"  max_num_seqs={config.max_num_seqs} max_num_batched_tokens="
        f"{config.max_num_batched_tokens} max_model_len={config.max_model_len} block_size="
        f"{config.block_size} num_blocks={config.num_blocks} enable_prefix_caching="
        f"{config.enable_prefix_caching}, {world.subject.depth} step(s) in flight"
    )
    print(f"  {world.policy}")
    for number, line in enumerate(describe_path(world, found.path), start=1):
        print(f"  {number}. {line}")


def add_arguments(parser: ArgumentParser) -> None:
    """Scheduler, policy, upper bounds of the configurations, processes."""
    add_subject_arguments(parser)
    parser.add_argument("--policy", choices=POLICIES, default="default", help="(default)")
    parser.add_argument("--requests", type=int, default=2, help="requests that arrive (2)")
    parser.add_argument("--max-model-len", type=int, default=3, help="longest sequence (3)")
    parser.add_argument("--block-size", type=int, default=3, help="largest block (3)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")


def run(options: Namespace) -> int:
    """Walk all configurations; 1 if a rule is broken."""
    for name in ("requests", "max_model_len", "block_size", "jobs"):
        if (value := getattr(options, name)) < 1:
            # Nothing at all would be walked, and no rule broken.
            options.parser.error(f"--{name.replace('_', '-')}={value}: must be at least 1")
    size = Size(options.requests, options.max_model_len, options.block_size)
    subject, given = subject_of(options)
    if not issubclass(subject.cls, NeuronScheduler):
        # Two states are told apart by what our classes hold.
        options.parser.error(f"--scheduler {subject.name}: must be derived from NeuronScheduler")
    subjects = OWN if options.scheduler is None and options.kind is None else (subject,)
    policies = (NeuronPolicy(**given.policy),) if given.policy else POLICIES[options.policy]
    if given.config:
        options.parser.error(f"{options.config}: config must be absent, every one is walked")
    every = list(worlds(size, policies, subjects))
    num_states = num_transitions = number = 0
    broken: Exploration | None = None
    with (
        Pool(options.jobs, end_with_parent) as pool,
        phase("configurations", len(every)) as advance,
    ):
        for found in pool.imap(explore, every, chunksize=4):
            number += 1
            num_states += found.num_states
            num_transitions += found.num_transitions
            advance(1)
            if found.violation is not None:
                broken = found
                break
    counts = {
        "configurations": number,
        "of": len(every),
        "states": num_states,
        "transitions": num_transitions,
    }
    if options.json:
        violation = broken and broken.violation
        path = list(describe_path(every[number - 1], broken.path)) if broken else []
        print(json.dumps({**counts, "violation": violation, "path": path}))
        return int(broken is not None)
    print(", ".join(f"{value:,} {name}" for name, value in counts.items()))
    if broken is not None:
        report_violation(every[number - 1], broken)
        return 1
    print("no rule is broken in any reachable state")
    return 0
