"""Bugs that other schedulers had in public, as scenarios; each names where it was reported."""

import itertools
from collections.abc import Iterable
from typing import Any, Literal

import pytest

from segattn.reference.paging import (
    check_buckets,
    default_buckets,
    num_blocks_for,
    slot_of,
    smallest_bucket,
)
from segattn.scheduler import (
    AsyncScheduler,
    NeuronPolicy,
    Request,
    RequestError,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
    SchedulerState,
)
from segattn.scheduler.admission import Admission
from segattn.scheduler.prefix_cache import pack_tokens
from segattn.tests.scheduler.engine import Engine, neuron, prompt

BOTH_LOOPS = pytest.mark.parametrize("asynchronous", [False, True])
EVERY_BASE_KIND = pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])


def _base(kind: type[Scheduler] = Scheduler, **config: Any) -> Scheduler:
    given: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 200,
    } | config
    return kind(SchedulerConfig(**given))


def _ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


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
    assert _ids(scheduler.waiting) == ["r3"]
    assert scheduler.waiting_reasons() == {"r3": Admission.MAX_NUM_SEQS}
    assert not any(scheduler.holdback_queues.values())
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
    engine = Engine[Scheduler](_base() if layer == "base" else neuron())
    engine.add("r1", prompt(4), 9)
    engine.step()
    with pytest.raises(ValueError, match=r"'r0'.*prompt_token_ids"):
        engine.add("r0", [], 1)
    assert [engine.step(), engine.step()] == [{"r1": 1}, {"r1": 1}]


@EVERY_BASE_KIND
def test_a_victim_that_was_scheduled_in_the_same_step_leaves_it(kind: type[Scheduler]) -> None:
    # vllm-project/vllm#23347, #28558
    scheduler = _base(
        kind,
        policy="priority",
        num_blocks=6,
        max_num_batched_tokens=8,
        max_model_len=20,
        enable_prefix_caching=False,
    )
    engine = Engine(scheduler, depth=1)
    engine.add("low", prompt(8), 9, priority=5, arrival_time=0.0)
    engine.step()
    engine.add("high", prompt(8, 50), 9, priority=0, arrival_time=1.0)
    # low already takes the one free block, high is admitted with two, none is left for high.
    while scheduler.requests["high"].num_computed_tokens < 8:
        engine.step()
    low, high = scheduler.requests["low"], scheduler.requests["high"]
    for _ in range(9):
        output = engine.schedule()
        if output.preempted_req_ids:
            break
        engine.deliver()
    assert output.preempted_req_ids == {"low"}
    assert output.num_scheduled_tokens == {"high": 1}
    assert output.total_num_scheduled_tokens == 1
    assert output.scheduled_cached_reqs.req_ids == ["high"]
    assert (low.num_computed_tokens, low.block_ids) == (0, [])
    assert _ids(scheduler.running) == ["high"]
    assert _ids(scheduler.waiting) == ["low"]
    assert scheduler.num_free_blocks == 5 - len(high.block_ids)


def test_each_token_arrives_once_when_its_request_is_preempted_while_in_flight() -> None:
    # vllm-project/vllm#48245, #47900
    def run(kind: type[Scheduler], depth: int) -> tuple[dict[str, list[int]], int]:
        scheduler = _base(
            kind, num_blocks=7, max_num_seqs=2, max_model_len=24, enable_prefix_caching=False
        )
        engine = Engine(scheduler, depth=depth)
        engine.add("first", prompt(4), 16)
        engine.add("r", prompt(4, 50), 12)
        num_preemptions = 0
        for _ in range(100):
            if not scheduler.has_requests():
                break
            num_preemptions += len(engine.schedule().preempted_req_ids)
            if len(engine._in_flight) >= depth:
                engine.deliver()
            for request in scheduler.requests.values():
                assert request.num_output_placeholders >= 0
        engine.drain()
        return engine.tokens, num_preemptions

    tokens, num_preemptions = run(AsyncScheduler, 2)
    assert num_preemptions > 0
    assert tokens == {"first": list(range(104, 120)), "r": list(range(104, 116))}
    assert tokens == run(Scheduler, 1)[0]


@pytest.mark.parametrize("discard", [True, False])
@pytest.mark.parametrize("layer", ["base", "neuron"])
def test_tokens_in_flight_at_a_reset_are_dropped_and_sampled_anew(
    layer: str, discard: bool
) -> None:
    # vllm-project/vllm#38624: the same kind, forced by reset_prefix_cache
    scheduler = _base(AsyncScheduler) if layer == "base" else neuron(asynchronous=True)
    engine = Engine[Scheduler](scheduler, depth=2)
    engine.add("r", prompt(4), 5)
    engine.step()
    engine.step()
    if discard:
        scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run(30)
    assert engine.tokens == {"r": [104, 105, 106, 107, 108]}


@pytest.mark.parametrize("layer", ["base", "neuron"])
def test_no_decode_is_scheduled_beyond_max_tokens(layer: str) -> None:
    # vllm-project/vllm#27922
    scheduler = _base(AsyncScheduler) if layer == "base" else neuron(asynchronous=True)
    engine = Engine[Scheduler](scheduler, depth=2)
    engine.add("r", prompt(4), 2)
    scheduled = [step for step in engine.run(10) if step]
    assert scheduled == [{"r": 4}, {"r": 1}]
    assert len(engine.tokens["r"]) == 2
    assert scheduler.num_free_blocks == 199


@pytest.mark.parametrize(
    ("length", "num_cached", "num_new"), [(12, 8, 4), (13, 12, 1), (14, 12, 2), (16, 12, 4)]
)
def test_a_fully_cached_prompt_recomputes_its_last_token(
    length: int, num_cached: int, num_new: int
) -> None:
    # vllm-project/vllm#17999, ai-dynamo/dynamo#13312
    scheduler = neuron()
    engine = Engine(scheduler)
    engine.add("first", prompt(16), 1)
    engine.run(5)
    first_blocks = {1, 2, 3, 4}
    engine.add("r", prompt(length), 4)
    output = engine.schedule()
    (new,) = output.scheduled_new_reqs
    assert new.num_computed_tokens == num_cached
    assert output.num_scheduled_tokens == {"r": num_new}
    assert output.num_scheduled_tokens_padded == {"r": 64}
    shared = new.block_ids[0][: num_cached // 4]
    assert set(shared) <= first_blocks
    assert not set(new.block_ids[0][num_cached // 4 :]) & set(shared)


def test_one_new_token_behind_a_cached_prompt_is_all_that_is_computed() -> None:
    # vllm-project/vllm#17999
    engine = Engine(neuron())
    engine.add("first", prompt(16), 1)
    engine.run(5)
    engine.add("r", prompt(17), 4)
    output = engine.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 16
    assert output.num_scheduled_tokens == {"r": 1}


def test_a_block_that_is_handed_out_again_loses_its_hash() -> None:
    # vllm-project/vllm#4764, ovg-project/kvcached#362
    engine = Engine(_base(num_blocks=4))
    engine.add("A", prompt(8), 1)
    engine.run(5)
    engine.add("B", prompt(9, 11), 1)
    engine.run(5)
    cache = engine.scheduler.kv_cache_manager
    for request, num_hits in (
        (Request("C", [*prompt(8), 99], 1), 0),
        (Request("D", [*prompt(8, 11), 99], 1), 2),
    ):
        cache.hash_prompt(request, pack_tokens(request.prompt_token_ids))
        assert len(cache.get_computed_blocks(request)) == num_hits


def test_finishing_twice_frees_once() -> None:
    # vllm-project/vllm#42571
    scheduler = _base(num_blocks=5, enable_prefix_caching=True)
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


@pytest.mark.parametrize("layer", ["base", "neuron"])
def test_a_preempted_prompt_does_not_start_over_every_other_step(layer: str) -> None:
    # vllm-project/vllm#25538, #41951
    config: dict[str, Any] = {
        "num_blocks": 6,
        "max_num_batched_tokens": 5,
        "max_model_len": 20,
        "enable_prefix_caching": False,
    }
    scheduler = _base(**config) if layer == "base" else neuron(**config)
    engine = Engine[Scheduler](scheduler)
    engine.add("r1", prompt(12), 5)
    while scheduler.requests["r1"].num_computed_tokens < 12:
        engine.step()
    engine.add("r2", prompt(12, 50), 1)
    preempted: list[str] = []
    for _ in range(30):
        if scheduler.has_requests():
            preempted += engine.schedule().preempted_req_ids
            engine.deliver()
    assert engine.finish_reasons == {"r1": "length", "r2": "length"}
    assert "r1" not in preempted
    if layer == "neuron":
        assert preempted == []


def test_the_second_chunk_of_a_resume_is_a_prefill_of_its_own() -> None:
    # tenstorrent/vllm#326
    scheduler = neuron(max_num_batched_tokens=8, enable_prefix_caching=False)
    engine = Engine(scheduler)
    engine.add("r", prompt(6), 20)
    for _ in range(4):
        engine.step()
    engine.add("other", prompt(4, 50), 20)
    engine.step()
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.requests["r"].num_tokens == 10
    for num_tokens in (8, 2):
        output = engine.schedule()
        assert output.num_scheduled_tokens == {"r": num_tokens}
        assert output.num_scheduled_tokens_padded == {"r": 8}
        assert scheduler.state is SchedulerState.ACTIVE_PREFILL
        engine.deliver()
    # Its logits are taken: the token after the recomputed ones continues the text.
    assert engine.tokens["r"][-1] == 100 + 10


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (100, [100]),
        (128, [128]),
        (317, [128, 256, 317]),
        (3000, [128, 256, 512, 1024, 2048, 3000]),
        (8192, [128, 256, 512, 1024, 2048, 4096, 8192]),
    ],
)
def test_a_budget_that_is_no_power_of_two_is_a_bucket(budget: int, expected: list[int]) -> None:
    # vllm-project/vllm#16726, vllm-project/tpu-inference#3466
    scheduler = neuron(
        max_num_batched_tokens=budget,
        max_model_len=131072,
        num_blocks=40000,
        enable_prefix_caching=False,
    )
    assert list(scheduler.prefill_buckets) == expected
    engine = Engine(scheduler)
    for length in sorted({1, min(127, budget), min(129, budget), budget - 1, budget}):
        engine.add(f"p{length}", prompt(length), 1)
        padded = engine.schedule().num_scheduled_tokens_padded
        engine.deliver()
        assert padded == {f"p{length}": min(size for size in expected if size >= length)}


def test_a_bucket_is_always_one_of_the_list() -> None:
    # HabanaAI/vllm-hpu-extension#121
    buckets = [6, 12, 24, 48, 96, 192, 384, 512, 1024]
    assert smallest_bucket(640, check_buckets("b", buckets, 1024)) == 1024
    with pytest.raises(ValueError, match="1025"):
        smallest_bucket(1025, buckets)
    assert default_buckets(3000)[-1] == 3000


@pytest.mark.parametrize(
    ("length", "in_last_block", "slot", "new_block"),
    [(1, 1, 36, False), (3, 3, 38, False), (4, 4, 39, True), (5, 1, 8, False), (8, 4, 11, True)],
)
def test_a_length_that_fills_its_last_block_has_a_full_one(
    length: int, in_last_block: int, slot: int, new_block: bool
) -> None:
    # Wenyueh/MinivLLM#87
    assert length - 4 * (num_blocks_for(length, 4) - 1) == in_last_block
    assert slot_of(length - 1, [9, 2], 4) == slot
    engine = Engine(_base(enable_prefix_caching=False))
    engine.add("r", prompt(length), 9)
    engine.step()
    output = engine.schedule()
    (blocks,) = output.scheduled_cached_reqs.new_block_ids
    assert (blocks is not None) is new_block


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
