"""The runner on hand-made scheduler outputs, with NaN wherever nothing may be read.

Block ids, chunks and order are chosen here, so no scheduler takes part. The expected tokens come
from the plain forward pass, which has no cache, no padding and no kernel.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segattn.runner.compile_plan import CompilePlan
from segattn.runner.llama import Llama
from segattn.runner.model_runner import ModelRunner, StepResult, greedy
from segattn.runner.paged_cache import PagedKVCache
from segattn.runner.plain_forward import plain_logits
from segattn.scheduler import CachedRequestData, NewRequestData, SchedulerConfig, SchedulerOutput
from segattn.tests.runner.random_model import CONFIG, random_weights

SCHEDULING = SchedulerConfig(
    max_num_seqs=4,
    max_num_batched_tokens=150,
    max_model_len=200,
    block_size=16,
    num_blocks=64,
    num_batched_tokens_buckets=[20, 128, 150],
)
PROMPT = [5, 9, 2, 77, 31, 8, 300, 12, 55, 6, 41, 19, 23, 101, 7, 3, 250, 11, 90, 14]


def poisoned_model() -> Llama:
    """A model whose padding token is NaN, so that every padded lane of every layer is NaN."""
    weights = random_weights()
    weights.embedding[0] = np.nan
    return Llama(CONFIG, weights)


def poisoned_runner(model: Llama) -> ModelRunner:
    """A runner whose whole cache, block 0 included, is NaN before the first step."""
    cache = PagedKVCache(CONFIG, SCHEDULING.num_blocks, SCHEDULING.block_size, model.dtype)
    cache.keys.fill(np.nan)
    cache.values.fill(np.nan)
    return ModelRunner(model, CompilePlan(SCHEDULING), cache, kv_segment_size=128)


def greedy_tokens(model: Llama, prompt: list[int], num_tokens: int) -> list[int]:
    """Continuation by the plain forward pass."""
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(int(plain_logits(model, known, first=len(known) - 1)[0].argmax()))
    return known[len(prompt) :]


NO_CACHED = CachedRequestData([], set(), [], {}, [], [], [])


def step(
    tokens: dict[str, int],
    *,
    new: list[NewRequestData] | None = None,
    cached: CachedRequestData = NO_CACHED,
    padded: dict[str, int] | None = None,
    finished: set[str] | None = None,
) -> SchedulerOutput:
    """A scheduler output of real token counts `tokens`."""
    return SchedulerOutput(
        new or [], cached, tokens, sum(tokens.values()), {}, [0], finished or set(), set(),
        num_scheduled_tokens_padded=padded or tokens,
    )  # fmt: skip


def prefill(
    req_id: str, prompt: list[int], blocks: list[int], num_tokens: int, prior: int = 0
) -> SchedulerOutput:
    """First chunk of a request."""
    new = NewRequestData(req_id, prompt, (blocks,), prior)
    bucket = next(b for b in SCHEDULING.prefill_buckets if b >= num_tokens)
    return step({req_id: num_tokens}, new=[new], padded={req_id: bucket})


def go_on(
    computed: dict[str, int],
    num_tokens: int = 1,
    *,
    padded: int | None = None,
    new_blocks: dict[str, list[int]] | None = None,
    resumed: set[str] | None = None,
) -> SchedulerOutput:
    """A further chunk, or a decode, of requests that have `computed` tokens in the cache."""
    ids = list(computed)
    blocks: list[tuple[list[int], ...] | None] = [
        (new_blocks[i],) if new_blocks and i in new_blocks else None for i in ids
    ]
    cached = CachedRequestData(
        ids, resumed or set(), [], {}, blocks, list(computed.values()), [0] * len(ids)
    )
    tokens = dict.fromkeys(ids, num_tokens)
    return step(tokens, cached=cached, padded=dict.fromkeys(ids, padded or num_tokens))


def sampled(result: StepResult) -> list[list[int]]:
    """Tokens of a step."""
    return result.output.sampled_token_ids


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
    resumed = go_on({"a": 0}, 22, padded=128, new_blocks={"a": [11, 12]}, resumed={"a"})
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
    runner.execute_model(step({}, finished={"a"}))
    with pytest.raises(KeyError, match="a"):
        runner.execute_model(go_on({"a": 20}))


def test_a_batch_that_mixes_prefill_and_decode_is_an_error() -> None:
    runner = poisoned_runner(poisoned_model())
    runner.execute_model(prefill("a", PROMPT, [9, 4], 20))
    mixed = prefill("b", PROMPT, [6, 7], 20)
    mixed.num_scheduled_tokens["a"] = 1
    mixed.scheduled_cached_reqs = go_on({"a": 20}).scheduled_cached_reqs
    with pytest.raises(RuntimeError, match=r"mixed batch: prefill of \['b'\] and decode of \['a'"):
        runner.execute_model(mixed)


def test_two_prefills_in_one_step_are_an_error() -> None:
    both = prefill("a", PROMPT, [9, 4], 20)
    both.scheduled_new_reqs += prefill("b", PROMPT, [6, 7], 20).scheduled_new_reqs
    both.num_scheduled_tokens["b"] = 20
    with pytest.raises(RuntimeError, match=r"prefill of \['a', 'b'\] in one step"):
        poisoned_runner(poisoned_model()).execute_model(both)


def test_a_padded_count_outside_the_plan_is_an_error() -> None:
    runner = poisoned_runner(poisoned_model())
    scheduled = prefill("a", PROMPT, [9, 4], 20)
    scheduled.num_scheduled_tokens_padded = {"a": 21}
    with pytest.raises(RuntimeError, match=r"bucket=21.*is not in the compile plan"):
        runner.execute_model(scheduled)


def test_output_without_padded_counts_is_an_error() -> None:
    runner = poisoned_runner(poisoned_model())
    scheduled = dataclasses.replace(
        prefill("a", PROMPT, [9, 4], 20), num_scheduled_tokens_padded=None
    )
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
    np.testing.assert_allclose(result.logits["a"], expected, atol=2e-3)


def test_greedy_takes_the_smallest_id_of_a_tie() -> None:
    assert greedy("a", np.array([1.0, 3.0, 3.0], dtype=np.float32)) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_greedy_refuses_logits_that_are_not_finite(value: float) -> None:
    with pytest.raises(RuntimeError, match="request 'a': logits are not finite"):
        greedy("a", np.array([1.0, value], dtype=np.float32))
