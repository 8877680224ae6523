"""Requests that the published design blocks for ever: with `documented()`, not by default.

Configurations are the smallest that show the flaw. `bpr` is the number of blocks of one request of
max_model_len.
"""

from dataclasses import replace
from typing import Any

import pytest

from segattn.scheduler import (
    NeuronPolicy,
    NeuronScheduler,
    RequestError,
)
from segattn.tests.scheduler.engine import BOTH_LOOPS, Engine, neuron, neuron_engine, prompt

DOCUMENTED = NeuronPolicy.documented()
DEFAULT = NeuronPolicy()
NeuronEngine = Engine[NeuronScheduler]


@BOTH_LOOPS
@pytest.mark.parametrize(
    ("config", "prompt_length", "max_tokens"),
    [
        # One usable block, bpr 1, but the null block makes the bound 2.
        ({"block_size": 3, "max_model_len": 3, "num_blocks": 2, "max_num_seqs": 2}, 1, 2),
        # Seven usable blocks, bpr 4: room for one request of 100 tokens, the bound says 2.
        (
            {
                "block_size": 32,
                "max_model_len": 128,
                "num_blocks": 8,
                "max_num_batched_tokens": 128,
            },
            100,
            20,
        ),
    ],
)
def test_a_counted_null_block_deadlocks_and_usable_blocks_do_not(
    asynchronous: bool, config: dict[str, Any], prompt_length: int, max_tokens: int
) -> None:
    def run(policy: NeuronPolicy) -> tuple[NeuronEngine, list[dict[str, int]]]:
        engine = neuron_engine(policy, asynchronous=asynchronous, **config)
        engine.add("A", prompt(prompt_length), max_tokens)
        engine.add("B", prompt(prompt_length, 500), max_tokens)
        return engine, engine.run(80)

    stuck, steps = run(DOCUMENTED)
    assert len(steps) == 80
    assert steps[-20:] == [{}] * 20
    assert set(stuck.finish_reasons) == set()

    engine, steps = run(DEFAULT)
    assert engine.finish_reasons == {"A": "length", "B": "length"}
    assert len(steps) < 80


def test_a_pool_below_one_longest_request_disables_the_bound_or_makes_it_one() -> None:
    config: dict[str, Any] = {
        "block_size": 1,
        "max_model_len": 4,
        "num_blocks": 3,
        "max_num_seqs": 2,
    }

    def run(policy: NeuronPolicy) -> NeuronEngine:
        engine = neuron_engine(policy, **config)
        engine.add("A", prompt(1), 2)
        engine.add("B", prompt(2, 50), 1)
        engine.run(30)
        return engine

    stuck = run(DOCUMENTED)
    assert stuck.scheduler.get_num_unfinished_requests() == 2
    assert neuron(DOCUMENTED, **config).max_kv_concurrent == 2

    assert run(DEFAULT).finish_reasons == {"A": "length", "B": "length"}
    assert neuron(DEFAULT, **config).max_kv_concurrent == 1


def test_a_decode_is_preempted_only_with_the_null_block_counted() -> None:
    config: dict[str, Any] = {
        "block_size": 2,
        "max_model_len": 4,
        "num_blocks": 4,
        "max_num_seqs": 2,
    }

    def preemptions(policy: NeuronPolicy) -> list[str]:
        engine = neuron_engine(policy, **config)
        engine.add("A", prompt(2), 2)
        engine.add("B", prompt(2, 50), 2)
        preempted: list[str] = []
        for _ in range(20):
            if engine.scheduler.has_requests():
                preempted += engine.schedule().preempted_req_ids
                engine.deliver()
        return preempted

    assert preemptions(DOCUMENTED) == ["A"]
    assert preemptions(DEFAULT) == []


def test_a_preempted_request_hides_the_last_decode_for_ever_only_with_the_null_block_counted() -> (
    None
):
    config: dict[str, Any] = {
        "block_size": 3,
        "max_model_len": 6,
        "num_blocks": 4,
        "max_num_seqs": 2,
    }

    def run(policy: NeuronPolicy) -> NeuronEngine:
        engine = neuron_engine(policy, **config)
        engine.add("A", prompt(1), 4)
        engine.add("B", prompt(1, 50), 5)
        engine.run(60)
        return engine

    assert run(DOCUMENTED).finish_reasons == {}
    assert run(DEFAULT).finish_reasons == {"A": "length", "B": "length"}


def test_a_prompt_preempts_itself_for_ever_only_with_the_null_block_counted() -> None:
    # Without the whole prompt reserved a chunk is admitted that the next one finds no block for.
    config: dict[str, Any] = {
        "block_size": 4,
        "max_model_len": 7,
        "num_blocks": 4,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 2,
        "scheduler_reserve_full_isl": False,
        "enable_prefix_caching": False,
    }

    def run(policy: NeuronPolicy) -> tuple[NeuronEngine, int]:
        engine = neuron_engine(policy, **config)
        engine.add("A", prompt(5), 2)
        engine.add("B", prompt(4, 50), 3)
        num_preemptions = 0
        for _ in range(60):
            if engine.scheduler.has_requests():
                num_preemptions += len(engine.schedule().preempted_req_ids)
                engine.deliver()
        return engine, num_preemptions

    # In 60 steps: once for B, then every third step A for its own third chunk.
    stuck, num_preemptions = run(DOCUMENTED)
    assert stuck.finish_reasons == {}
    assert num_preemptions == 19

    engine, num_preemptions = run(DEFAULT)
    assert engine.finish_reasons == {"A": "length", "B": "length"}
    assert num_preemptions == 0


def test_decodes_starve_behind_a_stream_of_prompts_unless_prefills_in_a_row_are_limited() -> None:
    def decode_steps(policy: NeuronPolicy) -> int:
        engine = neuron_engine(policy)
        engine.add("D", prompt(4), 60)
        engine.step()
        count = 0
        for number in range(50):
            engine.add(f"short{number}", prompt(4, 100 + number), 1)
            count += "D" in engine.step()
        return count

    assert decode_steps(DOCUMENTED) == 0
    assert decode_steps(replace(DEFAULT, max_consecutive_prefills=None)) == 0
    assert decode_steps(DEFAULT) == 10
    assert decode_steps(replace(DEFAULT, max_consecutive_prefills=1)) == 25


def test_a_watermark_cannot_be_overdrawn_where_admission_reserves_all_blocks() -> None:
    # In the design the base sees no running request while decodes are hidden, and leaves the
    # watermark aside. By default it stays free, and the second request waits for the first.
    config: dict[str, Any] = {"num_blocks": 9, "max_model_len": 16, "watermark": 0.8}
    engine = neuron_engine(DEFAULT, **config)
    for name in "AB":
        engine.add(name, prompt(4), 12)
    engine.run(40)
    assert engine.finish_reasons == {"A": "length", "B": "length"}
    assert [engine.scheduler.requests.get(name) for name in "AB"] == [None, None]


def test_a_prompt_as_long_as_the_model_hides_all_decodes_for_ever_unless_refused() -> None:
    config: dict[str, Any] = {"max_model_len": 16, "max_num_batched_tokens": 8}
    stuck = neuron_engine(DOCUMENTED, **config)
    stuck.add("A", prompt(4), 8)
    stuck.step()
    stuck.add("B", prompt(16, 50), 1)
    steps = [stuck.step() for _ in range(20)]
    assert steps[:3] == [{"B": 8}, {"B": 7}, {}]
    assert steps[3:] == [{}] * 17

    engine = neuron_engine(DEFAULT, **config)
    engine.add("A", prompt(4), 8)
    engine.step()
    with pytest.raises(RequestError, match=r"'B'.*16 tokens must be shorter than max_model_len=16"):
        engine.add("B", prompt(16, 50), 1)
    engine.run(20)
    assert engine.finish_reasons == {"A": "length"}


def test_min_tokens_beyond_the_model_hold_no_slot() -> None:
    # Until 0.28 vLLM ended no request before min_tokens, not even at max_model_len.
    for policy in (DOCUMENTED, DEFAULT):
        engine = neuron_engine(policy, max_model_len=8, max_num_seqs=1)
        engine.add("A", prompt(4), 9, min_tokens=5)
        engine.run(30)
        assert engine.finish_reasons == {"A": "length"}
    with pytest.raises(RequestError, match=r"max_tokens=-1: must be at least 1"):
        engine.add("A", prompt(4), -1)
