"""The explorer walks all states and finds known deadlocks."""

from copy import deepcopy
from itertools import islice
from typing import Any

import pytest

from segattn.cli import main
from segattn.scheduler import NeuronPolicy, NeuronScheduler, Request, SchedulerConfig
from segattn.scheduler.testing.clone import Cloner
from segattn.scheduler.testing.explore_command import OWN, POLICIES, Size, describe_path, worlds
from segattn.scheduler.testing.explorer import (
    CLONER,
    Situation,
    World,
    actions,
    explore,
    key_of,
    perform,
)

SIZES = ((1, 1, 0), (1, 2, 0), (2, 2, 0))


def small_world(policy: NeuronPolicy | None = None, depth: int = 1, **changes: Any) -> World:
    numbers: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 2,
        "max_model_len": 4,
        "block_size": 2,
        "num_blocks": 5,
        "num_batched_tokens_buckets": [1, 2],
    }
    config = SchedulerConfig(**(numbers | changes))
    return World(OWN[depth - 1], config, policy or NeuronPolicy(), SIZES, 2)


def test_no_rule_is_broken_in_any_state_of_the_smallest_configurations() -> None:
    every = list(worlds(Size(2, 2, 2), POLICIES["default"]))
    found = [explore(world) for world in every]
    assert [result.violation for result in found] == [None] * len(every)


def test_no_rule_is_broken_in_every_fortieth_configuration_of_the_next_size() -> None:
    for world in islice(worlds(Size(2, 3, 3), POLICIES["default"]), 0, None, 40):
        assert explore(world).violation is None, world


def test_the_documented_policy_deadlocks_by_counting_the_null_block() -> None:
    world = World(
        OWN[0],
        SchedulerConfig(2, 3, 3, 3, 2, enable_prefix_caching=False),
        NeuronPolicy.documented(),
        ((1, 2, 0),),
        2,
    )
    found = explore(world)
    assert found.violation is not None
    assert found.violation.startswith("a deadlock")
    assert list(describe_path(world, found.path)) == [
        "add r0: prompt of 1 tokens, max_tokens=2",
        "add r1: prompt of 1 tokens, max_tokens=2",
        "schedule: r0",
        "deliver the output of the oldest step",
        "schedule",
    ]


def test_the_command_prints_the_shortest_way_into_the_documented_deadlock(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explore", "--policy", "documented"]) == 1
    printed = capsys.readouterr().out
    assert "a deadlock" in printed
    assert "1. add r0" in printed


@pytest.mark.parametrize("flag", ["--requests", "--max-model-len", "--block-size", "--jobs"])
def test_the_command_refuses_a_size_at_which_nothing_is_walked(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explore", flag, "0"]) == 2
    assert f"{flag}=0: must be at least 1" in capsys.readouterr().err


def test_the_command_counts_the_states_of_the_default_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explore", "--requests", "1", "--max-model-len", "2"]) == 0
    printed = capsys.readouterr().out
    assert "no rule is broken" in printed


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True])
def test_states_with_equal_keys_have_equal_futures(depth: int, caching: bool) -> None:
    world = small_world(
        NeuronPolicy(max_consecutive_prefills=1), depth, enable_prefix_caching=caching
    )
    futures: dict[Any, dict[Any, Any]] = {}
    todo = [world.start()]
    repeats = 0
    while todo:
        now = todo.pop()
        seen = successors(world, now)
        key = key_of(world, now)
        if key in futures:
            repeats += 1
            assert {action: key_of(world, after) for action, after in seen.items()} == futures[key]
            continue
        futures[key] = {action: key_of(world, after) for action, after in seen.items()}
        todo.extend(seen.values())
    assert repeats > len(futures)


def successors(world: World, now: Situation) -> dict[Any, Situation]:
    """Situation after each action, named without the requests' arrival numbers."""
    after = {}
    live = now.audit.live_ids()
    for action in actions(world, now):
        copied = CLONER.copy(now)
        if perform(world, copied, action):
            after[canonical(action, live)] = copied
    return after


def canonical(action: tuple[Any, ...], live: list[str]) -> tuple[Any, ...]:
    if action[0] == "abort":
        return ("abort", live.index(action[1]))
    if action[0] == "deliver":
        return ("deliver", tuple(live.index(name) for name in action[1]))
    return action


def test_a_clone_is_independent_and_equal() -> None:
    scheduler = NeuronScheduler(SchedulerConfig(2, 4, 8, 2, 9))
    scheduler.add_request(Request("a", [1, 2, 3], 3))
    copied = CLONER.copy(scheduler)
    reference = deepcopy(scheduler)
    step = scheduler.schedule()
    assert (copied.schedule(), reference.schedule()) == (step, step)
    assert copied.requests["a"] is copied.running[0]
    assert copied.requests["a"] is not scheduler.requests["a"]


def test_a_clone_refuses_what_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="cannot be copied"):
        Cloner().copy([len])
