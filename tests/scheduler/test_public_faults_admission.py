"""Bugs that other schedulers had in public: requests that wait, are refused or are aborted.

Each test names where the bug was reported.
"""

import itertools
from typing import Literal

import pytest

from segattn.scheduler import (
    NeuronPolicy,
    Request,
    RequestError,
    RequestStatus,
    Scheduler,
)
from segattn.scheduler.admission import Admission
from segattn.tests.scheduler.base import names
from segattn.tests.scheduler.engine import BOTH_LOOPS, Engine, base, neuron, prompt


@BOTH_LOOPS
def test_a_request_that_is_held_back_can_be_aborted(asynchronous: bool) -> None:
    # torch-spyre/sendnn-inference#36
    scheduler = neuron(asynchronous=asynchronous, max_num_seqs=2)
    engine = Engine(scheduler, depth=2 if asynchronous else 1)
    for name in ("r1", "r2"):
        engine.add(name, prompt(4), 30)
    for _ in range(4):
        engine.step()
    num_free = scheduler.num_free_blocks
    engine.add("r3", prompt(4, 50), 5)
    engine.step()
    assert names(scheduler.waiting) == ["r3"]
    assert scheduler.waiting_reasons() == {"r3": Admission.MAX_NUM_SEQS}
    assert not any(scheduler.rules.holdback.waiting.values())
    assert scheduler.finish_requests("r3", RequestStatus.FINISHED_ABORTED) == ["r3"]
    assert [set(engine.step()) for _ in range(3)] == [{"r1", "r2"}] * 3
    assert scheduler.get_num_unfinished_requests() == 2
    assert scheduler.num_free_blocks in (num_free, num_free - 2)


def test_a_request_aborted_between_its_chunks_returns_its_blocks_and_its_place() -> None:
    # torch-spyre/sendnn-inference#36
    scheduler = neuron(max_num_batched_tokens=4)
    engine = Engine(scheduler)
    engine.add("r3", prompt(12), 5)
    engine.add("next", prompt(4, 50), 5)
    assert [engine.step(), engine.step()] == [{"r3": 4}, {"r3": 4}]
    scheduler.finish_requests("r3", RequestStatus.FINISHED_ABORTED)
    assert scheduler.num_free_blocks == 199
    assert engine.step() == {"next": 4}


@BOTH_LOOPS
@pytest.mark.parametrize("kv_admission", ["worst_case", "reserved"])
def test_decodes_go_on_while_a_prompt_cannot_get_blocks(
    asynchronous: bool, kv_admission: Literal["worst_case", "reserved"]
) -> None:
    # RBLN-SW/vllm-rbln#179
    policy = NeuronPolicy(kv_admission=kv_admission)
    scheduler = neuron(
        policy, asynchronous=asynchronous, max_num_seqs=3, num_blocks=5, max_model_len=8
    )
    engine = Engine(scheduler, depth=2 if asynchronous else 1, model=lambda *_: 7)
    engine.add("r1", prompt(5), 3)
    engine.add("r2", prompt(5, 20), 3)
    engine.step()
    engine.step()
    engine.add("r3", prompt(4, 40), 1)
    steps = []
    for _ in range(20):
        if scheduler.has_requests():
            started = len(scheduler.running) < 2
            steps.append(engine.step())
            assert ("r3" in steps[-1]) <= started
            if not asynchronous:
                assert steps[-1] or not scheduler.get_num_unfinished_requests()
    assert steps[0] == {"r1": 1, "r2": 1}
    assert {"r3": 4} in steps
    assert engine.finish_reasons == dict.fromkeys(("r1", "r2", "r3"), "length")


@BOTH_LOOPS
def test_a_prompt_larger_than_the_usable_pool_is_refused_and_blocks_nobody(
    asynchronous: bool,
) -> None:
    # vllm-project/vllm#39734, RBLN-SW/vllm-rbln#957: one block is the null block
    engine = Engine(neuron(asynchronous=asynchronous, num_blocks=5, max_model_len=20))
    with pytest.raises(RequestError, match=r"'A'.*needs 5 KV blocks, the cache has 4"):
        engine.add("A", prompt(17), 1)
    assert engine.scheduler.get_num_unfinished_requests() == 0
    engine.add("B", prompt(4, 50), 1)
    engine.run(6)
    assert engine.finish_reasons == {"B": "length"}

    fits = Engine(neuron(asynchronous=asynchronous, num_blocks=5, max_model_len=20))
    fits.add("A", prompt(16), 1)
    fits.add("B", prompt(4, 50), 1)
    fits.run(6)
    assert fits.finish_reasons == {"A": "length", "B": "length"}


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_the_last_token_needs_no_block_and_the_refusal_knows(max_tokens: int) -> None:
    # Prompt and outputs but the last one are written: 9 + max_tokens - 1 rows, 12 in 3 blocks.
    scheduler = neuron(num_blocks=4, max_model_len=32)
    engine = Engine(scheduler)
    if max_tokens <= 4:
        engine.add("A", prompt(9), max_tokens)
        engine.run(20)
        assert len(engine.tokens["A"]) == max_tokens
    else:
        with pytest.raises(RequestError, match="needs"):
            engine.add("A", prompt(9), max_tokens)


@pytest.mark.parametrize("layer", ["base", "neuron"])
def test_an_empty_prompt_is_refused_and_others_go_on(layer: str) -> None:
    # vllm-project/vllm#7632
    engine = Engine[Scheduler](base() if layer == "base" else neuron())
    engine.add("r1", prompt(4), 9)
    engine.step()
    with pytest.raises(ValueError, match=r"'r0'.*prompt_token_ids"):
        engine.add("r0", [], 1)
    assert [engine.step(), engine.step()] == [{"r1": 1}, {"r1": 1}]


def test_finishing_twice_frees_once() -> None:
    # vllm-project/vllm#42571
    scheduler = base(num_blocks=5, enable_prefix_caching=True)
    engine = Engine(scheduler)
    engine.add("A", [*prompt(4), 90], 9)
    engine.step()
    engine.add("B", [*prompt(4), 80], 9)
    engine.step()
    blocks = [request.block_ids for request in scheduler.running]
    assert blocks == [[1, 2], [1, 3]]
    assert scheduler.num_free_blocks == 1
    abort = RequestStatus.FINISHED_ABORTED
    assert scheduler.finish_requests("A", abort) == ["A"]
    assert scheduler.finish_requests("A", abort) == []
    assert scheduler.finish_requests(["A", "A", "unknown"], abort) == []
    assert scheduler.num_free_blocks == 2
    engine.add("C", prompt(8, 50), 9)
    engine.step()
    assert sorted(scheduler.requests["C"].block_ids) == [2, 4]
    assert scheduler.num_free_blocks == 0


@BOTH_LOOPS
@pytest.mark.parametrize("kv_admission", ["worst_case", "reserved"])
def test_every_step_progresses_in_small_pools(
    asynchronous: bool, kv_admission: Literal["worst_case", "reserved"]
) -> None:
    # The kind behind RBLN-SW/vllm-rbln#179, over all small sizes.
    policy = NeuronPolicy(kv_admission=kv_admission)
    for block_size, num_blocks, max_model_len in itertools.product((1, 2, 3), range(2, 9), (3, 6)):
        scheduler = neuron(
            policy,
            asynchronous=asynchronous,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_num_seqs=3,
            max_num_batched_tokens=4,
        )
        engine = Engine(scheduler, depth=2 if asynchronous else 1)
        added = []
        for number, (length, max_tokens) in enumerate(((1, 3), (2, 1), (3, 3), (1, 5), (5, 1))):
            request = Request(f"r{number}", prompt(length, 9 * number), max_tokens)
            try:
                scheduler.add_request(request)
                added.append(request)
            except RequestError:
                continue
        engine.run(120)
        assert [request.status for request in added] == (
            [RequestStatus.FINISHED_LENGTH_CAPPED] * len(added)
        )
        assert all(request.num_preemptions == 0 for request in added)
