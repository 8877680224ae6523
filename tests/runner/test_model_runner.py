"""The runner on hand-made scheduler outputs, with NaN wherever nothing may be read.

Block ids, chunks and order are chosen here, so no scheduler takes part. The expected tokens come
from the plain forward pass, which has no cache, no padding and no kernel.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segattn.runner.compile_plan import CompilePlan
from segattn.runner.launch import RowError, StepResult
from segattn.runner.llama import Llama
from segattn.runner.model_runner import ModelRunner, verify
from segattn.runner.paged_cache import PagedKVCache
from segattn.runner.plain_forward import plain_logits
from segattn.scheduler import CachedRequestData, NewRequestData, SchedulerConfig, SchedulerOutput
from segattn.scheduler.output import StepKind
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


def poisoned_runner(model: Llama, *, drafting: bool = False) -> ModelRunner:
    """A runner whose whole cache, block 0 included, is NaN before the first step."""
    config = replace(SCHEDULING, num_speculative_tokens=3) if drafting else SCHEDULING
    cache = PagedKVCache(CONFIG, SCHEDULING.num_blocks, SCHEDULING.block_size, model.dtype)
    cache.keys.fill(np.nan)
    cache.values.fill(np.nan)
    return ModelRunner(model, CompilePlan(config), cache, kv_segment_size=128)


def greedy_tokens(model: Llama, prompt: list[int], num_tokens: int) -> list[int]:
    """Continuation by the plain forward pass."""
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(int(plain_logits(model, known, first=len(known) - 1)[0].argmax()))
    return known[len(prompt) :]


NO_CACHED = CachedRequestData([], set(), [], {}, [], [], [])


def step(
    tokens: dict[str, int],
    kind: StepKind,
    *,
    new: list[NewRequestData] | None = None,
    cached: CachedRequestData = NO_CACHED,
    padded: dict[str, int] | None = None,
    finished: set[str] | None = None,
    drafts: dict[str, list[int]] | None = None,
) -> SchedulerOutput:
    """A scheduler output of real token counts `tokens`."""
    return SchedulerOutput(
        new or [], cached, tokens, sum(tokens.values()), drafts or {}, [0], finished or set(),
        set(), step_kind=kind, num_scheduled_tokens_padded=padded or tokens,
    )  # fmt: skip


def prefill(
    req_id: str, prompt: list[int], blocks: list[int], num_tokens: int, prior: int = 0
) -> SchedulerOutput:
    """First chunk of a request."""
    new = NewRequestData(req_id, prompt, (blocks,), prior)
    bucket = next(b for b in SCHEDULING.prefill_buckets if b >= num_tokens)
    return step({req_id: num_tokens}, "prefill", new=[new], padded={req_id: bucket})


def go_on(
    computed: dict[str, int],
    num_tokens: int = 1,
    *,
    padded: int | None = None,
    new_blocks: dict[str, list[int]] | None = None,
    resumed: dict[str, list[int]] | None = None,
    drafts: dict[str, list[int]] | None = None,
    num_outputs: int = 99,
) -> SchedulerOutput:
    """A further chunk (`padded`), or a decode, of requests with `computed` tokens in the cache.

    `resumed` gives all tokens of requests that start anew.
    """
    ids = list(computed)
    blocks: list[tuple[list[int], ...] | None] = [
        (new_blocks[i],) if new_blocks and i in new_blocks else None for i in ids
    ]
    cached = CachedRequestData(
        ids, set(resumed or ()), [], resumed or {}, blocks, list(computed.values()),
        [num_outputs] * len(ids),
    )  # fmt: skip
    tokens = {i: num_tokens + len((drafts or {}).get(i, ())) for i in ids}
    kind: StepKind = "prefill" if padded else "decode"
    padded_counts = dict.fromkeys(ids, padded) if padded else tokens
    return step(tokens, kind, cached=cached, padded=padded_counts, drafts=drafts)


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


def test_drafts_are_computed_and_kept_as_far_as_they_are_the_greedy_tokens() -> None:
    model = poisoned_model()
    expected = {"a": greedy_tokens(model, PROMPT, 6), "b": greedy_tokens(model, PROMPT[3:], 6)}
    right, wrong = expected["a"], expected["b"]
    runner = poisoned_runner(model, drafting=True)
    runner.execute_model(prefill("a", PROMPT, [9, 4], 20))
    runner.execute_model(prefill("b", PROMPT[3:], [7, 8], 17))
    # Both of a's drafts are right; b's second is not, and it has no third.
    other = (wrong[2] + 1) % CONFIG.vocab_size or 1
    drafts = {"a": right[1:3], "b": [wrong[1], other]}
    result = runner.execute_model(go_on({"a": 20, "b": 17}, drafts=drafts))
    assert sampled(result) == [right[1:4], wrong[1:3]]
    assert (result.num_tokens, result.num_prior_tokens) == (6, 37)
    assert {i: len(logits) for i, logits in result.logits.items()} == {"a": 3, "b": 2}
    # The next step begins behind what was kept; a rejected draft's place is computed again.
    result = runner.execute_model(go_on({"a": 23, "b": 19}))
    assert sampled(result) == [right[4:5], wrong[3:4]]
    assert result.num_tokens == 2


@pytest.mark.parametrize("absent", [-1, CONFIG.vocab_size])
def test_a_draft_that_is_no_token_ends_the_drafts(absent: int) -> None:
    model = poisoned_model()
    expected = greedy_tokens(model, PROMPT, 4)
    runner = poisoned_runner(model, drafting=True)
    runner.execute_model(prefill("a", PROMPT, [9, 4], 20))
    result = runner.execute_model(go_on({"a": 20}, drafts={"a": [expected[1], absent, 5]}))
    assert sampled(result) == [expected[1:3]]
    assert result.num_tokens == 2


def test_placeholders_behind_a_prompt_are_not_computed() -> None:
    # What the scheduler makes of a request with one token left when drafts are on.
    model = poisoned_model()
    runner = poisoned_runner(model, drafting=True)
    runner.execute_model(prefill("a", PROMPT, [9, 4], 20))
    new = NewRequestData("b", [*PROMPT[:16], 44], ([9, 30],), 16)
    scheduled = step({"b": 3}, "prefill", new=[new], padded={"b": 20}, drafts={"b": [-1, -1]})
    result = runner.execute_model(scheduled)
    assert sampled(result) == [greedy_tokens(model, [*PROMPT[:16], 44], 1)]
    assert result.num_tokens == 1


def test_tokens_that_the_scheduler_dropped_are_dropped() -> None:
    model = poisoned_model()
    expected = greedy_tokens(model, PROMPT, 3)
    runner = poisoned_runner(model)
    runner.execute_model(prefill("a", PROMPT, [9, 4], 20))
    runner.execute_model(go_on({"a": 20}, num_outputs=1))
    runner.execute_model(go_on({"a": 21}, num_outputs=2))
    # Back to one output: the place of the second one is computed again.
    assert sampled(runner.execute_model(go_on({"a": 20}, num_outputs=1))) == [expected[1:2]]


def test_the_schedulers_tokens_hold_over_those_that_the_runner_sampled() -> None:
    model = poisoned_model()
    runner = poisoned_runner(model)
    runner.execute_model(prefill("a", PROMPT, [9, 4], 20))
    known = [*PROMPT, 77]
    scheduled = go_on({"a": 20}, num_outputs=1)
    scheduled.scheduled_cached_reqs.all_token_ids["a"] = known
    assert sampled(runner.execute_model(scheduled)) == [greedy_tokens(model, known, 1)]


def test_the_phase_is_read_and_not_decided_again() -> None:
    # Two known tokens are left: a resumed request may compute them in either graph.
    model = poisoned_model()
    known = [*PROMPT, *greedy_tokens(model, PROMPT, 2)]
    for padded, kind in ((None, "decode"), (20, "segmented_prefill")):
        runner = poisoned_runner(model, drafting=True)
        runner.execute_model(prefill("a", known, [9, 4], 20))
        result = runner.execute_model(go_on({"a": 20}, 2, padded=padded))
        assert result.shape is not None
        assert result.shape.kind == kind
        assert sampled(result) == [greedy_tokens(model, known, 1)]


BAD_ROWS = [
    ([5, -1], [9], "token id -1: must be within 0..319"),
    ([5, 320], [9], "token id 320: must be within 0..319"),
    ([5, 6], [-1], "block id -1: must be within 1..63"),
    ([5, 6], [0], "block id 0: must be within 1..63"),
    ([5, 6], [64], "block id 64: must be within 1..63"),
    ([5], [9], "2 tokens are scheduled, 1 are known"),
]


@pytest.mark.parametrize(("tokens", "blocks", "message"), BAD_ROWS)
def test_a_row_that_does_not_exist_is_refused_and_nothing_is_written(
    tokens: list[int], blocks: list[int], message: str
) -> None:
    runner = poisoned_runner(poisoned_model())
    with pytest.raises(RowError, match=f"request 'a': {message}") as caught:
        runner.execute_model(prefill("a", tokens, blocks, 2))
    assert caught.value.reasons == {"a": message}
    assert np.isnan(runner.cache.keys).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_named_in_every_kind_of_step(value: float) -> None:
    model = poisoned_model()
    model.weights.embedding[1] = value
    runner = poisoned_runner(model)
    with pytest.raises(RowError, match="request 'a': its hidden states or logits are not"):
        runner.execute_model(prefill("a", [5, 1, 7, 8], [9], 3))
    with pytest.raises(RowError, match="request 'a': its hidden states or logits are not"):
        runner.execute_model(prefill("a", [5, 6, 1], [9], 3))
    for name, block in (("b", 10), ("c", 11)):
        runner.execute_model(prefill(name, PROMPT[:5], [block], 5))
    decode = go_on({"b": 5, "c": 5})
    decode.scheduled_cached_reqs.all_token_ids["c"] = [*PROMPT[:5], 1]
    with pytest.raises(RowError) as caught:
        runner.execute_model(decode)
    assert list(caught.value.reasons) == ["c"]


def test_a_step_that_failed_leaves_the_block_table_as_it_was() -> None:
    model = poisoned_model()
    expected = greedy_tokens(model, PROMPT[:16], 3)
    runner = poisoned_runner(model)
    runner.execute_model(prefill("a", PROMPT[:16], [9], 16))
    lost = go_on({"a": 16}, new_blocks={"a": [30]})
    with pytest.raises(KeyError):
        runner.execute_model(go_on({"a": 16, "unknown": 1}, new_blocks={"a": [30]}))
    runner.take_back([runner.submit(lost)])
    result = runner.execute_model(go_on({"a": 16}, new_blocks={"a": [33]}))
    assert sampled(result) == [expected[1:2]]


def test_the_most_likely_token_is_the_smallest_id_of_a_tie() -> None:
    assert verify(np.array([[1.0, 3.0, 3.0]], dtype=np.float32), []) == [1]
