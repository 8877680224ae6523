"""The runner follows every field of the scheduler's output, and refuses what cannot be."""

import numpy as np
import pytest

from segattn.runner.launch import RowError
from segattn.runner.model_runner import verify
from segattn.scheduler import NewRequestData
from segattn.tests.runner.random_model import CONFIG
from segattn.tests.runner.runner_steps import (
    PROMPT,
    go_on,
    greedy_tokens,
    poisoned_model,
    poisoned_runner,
    prefill,
    sampled,
    step,
)


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
