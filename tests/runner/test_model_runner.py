"""The runner on hand-made scheduler outputs, with NaN wherever nothing may be read.

Block ids, chunks and order are chosen here, so no scheduler takes part. The expected tokens come
from the plain forward pass, which has no cache, no padding and no kernel.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segattn.runner.plain_forward import plain_logits
from segattn.tests.runner.random_model import CONFIG
from segattn.tests.runner.runner_steps import (
    PROMPT,
    SCHEDULING,
    go_on,
    greedy_tokens,
    poisoned_model,
    poisoned_runner,
    prefill,
    sampled,
    step,
)


def test_padded_lanes_unused_rows_and_block_zero_do_not_matter() -> None:
    """Prefill in two chunks, two more requests, then decodes in a padded batch, all in NaN."""
    model = poisoned_model()
    runner = poisoned_runner(model)
    others = {"b": PROMPT[:3], "c": PROMPT[4:17]}
    expected = {
        "a": greedy_tokens(model, PROMPT, 3),
        "b": greedy_tokens(model, others["b"], 3),
        "c": greedy_tokens(model, others["c"], 3),
    }
    assert sampled(runner.execute_model(prefill("a", PROMPT, [9, 4], 7))) == [[]]
    result = runner.execute_model(go_on({"a": 7}, 13, padded=20))
    assert sampled(result) == [expected["a"][:1]]
    assert sampled(runner.execute_model(prefill("b", others["b"], [20], 3))) == [expected["b"][:1]]
    assert sampled(runner.execute_model(prefill("c", others["c"], [2], 13))) == [expected["c"][:1]]
    for index in (1, 2):
        computed = {"c": 12 + index, "a": 19 + index, "b": 2 + index}
        result = runner.execute_model(go_on(computed))
        assert sampled(result) == [[expected[i][index]] for i in computed]
        assert result.shape is not None
        assert result.shape.bucket == 4


def test_only_the_slots_of_real_tokens_are_written() -> None:
    runner = poisoned_runner(poisoned_model())
    runner.execute_model(prefill("a", PROMPT, [9, 4], 20))
    for cache in (runner.cache.keys, runner.cache.values):
        finite = np.isfinite(cache)
        written = np.asarray(finite.all(axis=(0, 2, 4)))  # [num_blocks, block_size]
        assert written[9].all()
        assert written[4].tolist() == [True] * 4 + [False] * 12
        assert written.sum() == 20
        assert finite.any(axis=(0, 2, 4)).sum() == 20


def test_nothing_is_sampled_before_the_last_chunk() -> None:
    runner = poisoned_runner(poisoned_model())
    first = runner.execute_model(prefill("a", PROMPT, [9, 4], 7))
    assert (sampled(first), first.logits) == ([[]], {})
    last = runner.execute_model(go_on({"a": 7}, 13, padded=20))
    assert len(sampled(last)[0]) == 1
    assert list(last.logits) == ["a"]


def test_a_prefix_cache_hit_reads_the_blocks_of_another_request() -> None:
    model = poisoned_model()
    runner = poisoned_runner(model)
    runner.execute_model(prefill("a", PROMPT, [9, 4], 20))
    other = [*PROMPT[:16], 44]
    result = runner.execute_model(prefill("b", other, [9, 30], 1, prior=16))
    assert sampled(result) == [greedy_tokens(model, other, 1)]
    assert result.shape is not None
    assert result.shape.kind == "segmented_prefill"


def test_a_resumed_request_recomputes_its_outputs_in_new_blocks() -> None:
    model = poisoned_model()
    runner = poisoned_runner(model)
    expected = greedy_tokens(model, PROMPT, 3)
    runner.execute_model(prefill("a", PROMPT, [9, 4], 20))
    runner.execute_model(go_on({"a": 20}))
    # Its old blocks belong to others from here on.
    runner.cache.keys.fill(np.nan)
    runner.cache.values.fill(np.nan)
    known = PROMPT + expected[:2]
    resumed = go_on({"a": 0}, 22, padded=128, new_blocks={"a": [11, 12]}, resumed={"a": known})
    result = runner.execute_model(resumed)
    assert sampled(result) == [expected[2:3]]
    assert result.shape is not None
    assert result.shape.kind == "prefill"
    written = np.isfinite(runner.cache.keys).any(axis=(0, 2, 3, 4))
    assert np.flatnonzero(written).tolist() == [11, 12]


def test_new_blocks_are_appended_as_a_request_grows() -> None:
    model = poisoned_model()
    runner = poisoned_runner(model)
    prompt = PROMPT[:16]
    expected = greedy_tokens(model, prompt, 2)
    runner.execute_model(prefill("a", prompt, [9], 16))
    result = runner.execute_model(go_on({"a": 16}, new_blocks={"a": [33]}))
    assert sampled(result) == [expected[1:2]]


def test_the_runner_forgets_a_finished_request() -> None:
    runner = poisoned_runner(poisoned_model())
    runner.execute_model(prefill("a", PROMPT, [9, 4], 20))
    runner.execute_model(step({}, "empty", finished={"a"}))
    with pytest.raises(KeyError, match="a"):
        runner.execute_model(go_on({"a": 20}))


def test_a_batch_that_mixes_prefill_and_decode_is_an_error() -> None:
    runner = poisoned_runner(poisoned_model())
    runner.execute_model(prefill("a", PROMPT, [9, 4], 20))
    mixed = prefill("b", PROMPT, [6, 7], 20)
    mixed.num_scheduled_tokens["a"] = 1
    mixed.scheduled_cached_reqs = go_on({"a": 20}).scheduled_cached_reqs
    mixed.step_kind = "mixed"
    with pytest.raises(RuntimeError, match=r"prefill and decode in one step: \{'b': 20, 'a': 1\}"):
        runner.execute_model(mixed)


def test_two_prefills_in_one_step_are_an_error() -> None:
    both = prefill("a", PROMPT, [9, 4], 20)
    both.scheduled_new_reqs += prefill("b", PROMPT, [6, 7], 20).scheduled_new_reqs
    both.num_scheduled_tokens["b"] = 20
    with pytest.raises(RuntimeError, match=r"prefill of \['a', 'b'\]: a prefill graph"):
        poisoned_runner(poisoned_model()).execute_model(both)


def test_a_padded_count_outside_the_plan_is_an_error() -> None:
    runner = poisoned_runner(poisoned_model())
    scheduled = prefill("a", PROMPT, [9, 4], 20)
    scheduled.num_scheduled_tokens_padded = {"a": 21}
    with pytest.raises(RuntimeError, match=r"bucket=21.*is not in the compile plan"):
        runner.execute_model(scheduled)


def test_output_without_padded_counts_is_an_error() -> None:
    runner = poisoned_runner(poisoned_model())
    scheduled = replace(prefill("a", PROMPT, [9, 4], 20), num_scheduled_tokens_padded=None)
    with pytest.raises(RuntimeError, match="no padded token counts: use a Neuron kind"):
        runner.execute_model(scheduled)


def test_warm_up_runs_every_shape_and_leaves_the_cache_alone() -> None:
    runner = poisoned_runner(poisoned_model())
    assert tuple(runner.warm_up()) == runner.plan.shapes
    assert np.isnan(runner.cache.keys).all()
    assert np.isnan(runner.cache.values).all()


@settings(max_examples=8)
@given(chunks=st.lists(st.integers(1, 20), min_size=1, max_size=6), data=st.data())
def test_any_chunking_and_any_blocks_give_the_same_logits(
    chunks: list[int], data: st.DataObject
) -> None:
    model = poisoned_model()
    runner = poisoned_runner(model)
    prompt = np.random.default_rng(1).integers(1, CONFIG.vocab_size, sum(chunks)).tolist()
    blocks = data.draw(st.permutations(range(1, 9)))
    result = runner.execute_model(prefill("a", prompt, blocks, chunks[0]))
    done = chunks[0]
    for size in chunks[1:]:
        bucket = next(b for b in SCHEDULING.prefill_buckets if b >= size)
        result = runner.execute_model(go_on({"a": done}, size, padded=bucket))
        done += size
    expected = plain_logits(model, prompt, first=len(prompt) - 1)[0]
    np.testing.assert_allclose(result.logits["a"][0], expected, atol=2e-3)
