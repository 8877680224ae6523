"""For each rule that the explorer checks, a fault in the scheduler that it notices."""

from collections.abc import Callable
from typing import Any

import pytest

from segattn.scheduler import (
    Admission,
    NeuronPolicy,
    SchedulerConfig,
    neuron_scheduler,
    phases,
    prefix_digests,
)
from segattn.scheduler.block_pool import BlockPool
from segattn.scheduler.kv_cache_manager import KVCacheManager
from segattn.scheduler.neuron import NeuronRules
from segattn.scheduler.step import Step
from segattn.scheduler.testing.explore_command import OWN
from segattn.scheduler.testing.explorer import World, explore

RELEASE, TAKE, PADDED_COUNTS = BlockPool.release, BlockPool.take, phases.padded_counts
BLOCK_DIGESTS = prefix_digests.block_digests


def small_world(**changes: Any) -> World:
    numbers: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 2,
        "max_model_len": 4,
        "block_size": 2,
        "num_blocks": 5,
        "num_batched_tokens_buckets": [1, 2],
        "enable_prefix_caching": False,
    }
    policy = changes.pop("neuron_policy", NeuronPolicy())
    sizes = changes.pop("sizes", ((1, 1, 0), (1, 2, 0), (2, 2, 0)))
    config = SchedulerConfig(**(numbers | changes))
    return World(OWN[0], config, policy, sizes, 2)


def nothing(*_: object) -> None:
    """Replaces a step that the rule needs."""


def always(*_: object) -> bool:
    return True


def refuse(*_: object) -> Admission:
    return Admission.KV_BLOCKS


def leak(self: BlockPool, tables: list[list[int]]) -> None:
    """Gives back all blocks but one."""
    RELEASE(self, [table[1:] for table in tables])


def take_and_leave_free(self: BlockPool, num_blocks: int) -> list[int]:
    """Hands out the first free block and leaves it free."""
    blocks = TAKE(self, num_blocks)
    RELEASE(self, [blocks[:1]])
    return blocks


def take_what_is_owned(self: BlockPool, num_blocks: int) -> list[int]:
    """Hands out a block that a request owns already."""
    owned = [block for block, count in enumerate(self.ref_counts) if count]
    if not owned:
        return TAKE(self, num_blocks)
    self.ref_counts[owned[0]] += num_blocks
    return owned[:1] * num_blocks


def allocate_nothing(self: KVCacheManager, request: object, num_tokens: int) -> list[int]:
    return []


def miscount(self: BlockPool, tables: list[list[int]]) -> None:
    """Leaves a reference to a block that is free."""
    RELEASE(self, tables)
    self.ref_counts[tables[0][0]] = 1


def newest_first(self: NeuronRules) -> dict[str, Any]:
    """Shows the base the waiting request that came last."""
    held = self.holdback.waiting["waiting"]
    newest = list(held)[-1:]
    for request in newest:
        held.remove_requests([request])
        vars(self.scheduler)["waiting"].add_request(request)
    return {}


def pad_without_a_look(output: Any, *more: Any) -> tuple[dict[str, int], str]:
    """Pads a batch without a look at its phases."""
    try:
        return PADDED_COUNTS(output, *more)
    except RuntimeError:
        return dict(output.num_scheduled_tokens), "prefill"


def digests_of_any_tokens(parent: bytes, packed: bytes, block_size: int) -> list[bytes]:
    """Takes prompts of one length for the same: hits are right in number, and wrong in content."""
    return BLOCK_DIGESTS(parent, bytes(len(packed)), block_size)


def one_token_more(budget: int, input_budget: int, draft_slots: int) -> Step:
    return Step(budget + 1, input_budget, draft_slots)


TIGHT = {"num_blocks": 3}
CACHED = {"enable_prefix_caching": True}

FAULTS: list[tuple[str, dict[str, Any], list[tuple[Any, str, Any]]]] = [
    ("a deadlock", {}, [(NeuronRules, "can_schedule", refuse)]),
    (
        "a livelock",
        {"num_blocks": 3, "neuron_policy": NeuronPolicy.documented()},
        [(neuron_scheduler._Answers, "has_room", always)],
    ),
    (
        "tokens in flight are those of the steps in flight",
        {},
        [("segattn.scheduler.stepping", "advance", nothing)],
    ),
    (
        "a mixed step",
        {},
        [
            (NeuronRules, "_separate_phases", nothing),
            ("segattn.scheduler.neuron", "padded_counts", pad_without_a_look),
        ],
    ),
    ("RuntimeError: prefill and decode", {}, [(NeuronRules, "_separate_phases", nothing)]),
    ("more than one prefill", {}, [(NeuronRules, "max_prefills_per_batch", 2)]),
    ("a preemption", TIGHT, [(neuron_scheduler._Answers, "has_room", always)]),
    ("is admitted before", {}, [(NeuronRules, "_show_admitted", newest_first)]),
    (
        "1 tokens padded to 2",
        {},
        [("segattn.scheduler.phases", "smallest_bucket", lambda _, buckets: buckets[-1])],
    ),
    (
        "at most 1 of 2",
        {"max_num_scheduled_tokens": 1},
        [("segattn.scheduler.scheduler", "Step", one_token_more)],
    ),
    ("block 1: 1, owners 0", {}, [(BlockPool, "release", leak)]),
    ("block 1: 1, owners 0", {}, [(KVCacheManager, "free", nothing)]),
    ("block 1: 0, owners 1", {}, [(BlockPool, "take", take_and_leave_free)]),
    ("writes block 1 of r0", {"block_size": 4}, [(BlockPool, "take", take_what_is_owned)]),
    ("has the block table [1, 1]", CACHED, [(BlockPool, "take", take_what_is_owned)]),
    ("computes 1 tokens in 0 blocks", {}, [(KVCacheManager, "allocate_slots", allocate_nothing)]),
    ("the reference count of a block", {}, [(BlockPool, "release", miscount)]),
    (
        "where something else was computed",
        CACHED | {"sizes": ((3, 1, 0), (3, 1, 1))},
        [
            ("segattn.scheduler.kv_cache_manager", "block_digests", digests_of_any_tokens),
            ("segattn.scheduler.integrity", "block_digests", digests_of_any_tokens),
        ],
    ),
]


@pytest.mark.parametrize(("broken", "changes", "faults"), FAULTS)
def test_a_fault_in_the_scheduler_breaks_the_rule(
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
    changes: dict[str, Any],
    faults: list[tuple[Any, str, Callable[..., Any]]],
) -> None:
    world = small_world(**changes)
    assert explore(world).violation is None
    for owner, name, fault in faults:
        if isinstance(owner, str):
            monkeypatch.setattr(f"{owner}.{name}", fault)
        else:
            monkeypatch.setattr(owner, name, fault)
    violation = explore(world).violation
    assert violation is not None
    assert broken in violation


def test_an_aborted_request_that_stays_in_a_queue_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("segattn.scheduler.scheduler.forget", nothing)
    with pytest.raises((AssertionError, RuntimeError, KeyError)):
        assert explore(small_world()).violation is None
