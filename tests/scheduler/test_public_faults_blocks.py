"""Bugs that other schedulers had in public: cached prompts, blocks and buckets.

Each test names where the bug was reported.
"""

import pytest

from segattn.reference.paging import (
    check_buckets,
    default_buckets,
    num_blocks_for,
    slot_of,
    smallest_bucket,
)
from segattn.scheduler import (
    Request,
)
from segattn.scheduler.prefix_digests import pack_tokens
from segattn.tests.scheduler.engine import Engine, base, neuron, prompt


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
    engine = Engine(base(num_blocks=4))
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
    assert list(scheduler.rules.prefill_buckets) == expected
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
    engine = Engine(base(enable_prefix_caching=False))
    engine.add("r", prompt(length), 9)
    engine.step()
    output = engine.schedule()
    (blocks,) = output.scheduled_cached_reqs.new_block_ids
    assert (blocks is not None) is new_block
