"""The list of compiled shapes, worked out by hand for small configurations."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segattn.runner.compile_plan import CompilePlan, GraphShape
from segattn.scheduler import (
    ModelRunnerOutput,
    NeuronPolicy,
    NeuronScheduler,
    Request,
    RequestError,
    RequestStatus,
    SchedulerConfig,
    SchedulerState,
)


def config(**changed: Any) -> SchedulerConfig:
    """A small configuration in which every bucket can be reached."""
    values: dict[str, Any] = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 200,
        "max_model_len": 400,
        "block_size": 16,
        "num_blocks": 100,
    }
    return SchedulerConfig(**(values | changed))


def summary(plan: CompilePlan) -> dict[str, list[int]]:
    """Buckets by kind."""
    kinds: dict[str, list[int]] = {"prefill": [], "segmented_prefill": [], "decode": []}
    for shape in plan.shapes:
        kinds[shape.kind].append(shape.bucket)
    return kinds


def test_every_bucket_of_every_kind_is_in_the_plan() -> None:
    assert summary(CompilePlan(config())) == {
        "prefill": [128, 200],
        "segmented_prefill": [128, 200],
        "decode": [1, 2, 3],
    }


def test_shapes_hold_rows_rounded_up_to_128_and_blocks_for_the_longest_request() -> None:
    plan = CompilePlan(config())
    # 400 tokens in blocks of 16.
    assert plan.prefill(200, 0) == GraphShape("prefill", 200, 256, 25)
    assert plan.prefill(128, 7) == GraphShape("segmented_prefill", 128, 128, 25)
    assert plan.decode(2, 30) == GraphShape("decode", 2, 2, 25)


def test_a_decode_has_rows_for_every_draft() -> None:
    plan = CompilePlan(config(num_speculative_tokens=3))
    assert plan.decode(2, 30) == GraphShape("decode", 2, 2 * 4, 25, 4)
    assert plan.decode(2, 30).name == "decode_b2_t4_w25"


def test_without_cache_and_without_chunks_nothing_is_segmented() -> None:
    plan = CompilePlan(
        config(
            max_num_batched_tokens=400, enable_prefix_caching=False, enable_chunked_prefill=False
        )
    )
    assert summary(plan)["segmented_prefill"] == []


def test_without_cache_only_the_rest_behind_a_full_chunk_is_segmented() -> None:
    # A request knows at most 299 tokens, 200 of them in its first chunk: 99 are left.
    plan = CompilePlan(config(enable_prefix_caching=False, max_model_len=300))
    assert summary(plan)["segmented_prefill"] == [128]


def test_a_bucket_that_no_prompt_fills_is_left_out() -> None:
    # Prompts have at most 128 tokens, one less than max_model_len.
    plan = CompilePlan(config(max_model_len=129))
    assert summary(plan)["prefill"] == [128]


def test_a_small_cache_bounds_the_shapes() -> None:
    # 8 usable blocks hold 128 tokens, 112 behind a hit of one block.
    plan = CompilePlan(config(num_blocks=9, num_batched_tokens_buckets=[112, 128, 200]))
    assert summary(plan)["prefill"] == [112, 128]
    assert summary(plan)["segmented_prefill"] == [112]


def test_a_long_prefill_threshold_bounds_no_prompt_that_is_alone() -> None:
    plan = CompilePlan(config(long_prefill_token_threshold=64))
    assert summary(plan)["prefill"] == [128, 200]


def test_a_chunk_shorter_than_a_block_leaves_more_to_compute_than_a_hit() -> None:
    # 17 known tokens: 13 are left behind a chunk of 4, but only 1 behind a hit of 16.
    buckets = [1, 2, 4]
    plan = CompilePlan(
        config(max_num_batched_tokens=4, max_model_len=18, num_batched_tokens_buckets=buckets)
    )
    assert summary(plan)["segmented_prefill"] == buckets


def test_the_token_budget_bounds_the_decode_batch() -> None:
    assert summary(CompilePlan(config(max_num_scheduled_tokens=2)))["decode"] == [1, 2]


def test_the_cache_bounds_the_decode_batch() -> None:
    # A request that decodes owns one of the two usable blocks.
    assert summary(CompilePlan(config(num_blocks=3)))["decode"] == [1, 2]


def test_a_model_of_two_tokens_never_decodes() -> None:
    assert summary(CompilePlan(config(max_model_len=2)))["decode"] == []


def test_decode_has_a_graph_per_batch_and_context_bucket() -> None:
    plan = CompilePlan(config(), decode_context_length_buckets=[100])
    # 100 tokens lie in 7 blocks of 16.
    assert plan.decode(1, 100).num_blocks == 7
    assert plan.decode(1, 101).num_blocks == 25
    assert len([shape for shape in plan.shapes if shape.kind == "decode"]) == 6


@pytest.mark.parametrize("buckets", [[400], [100, 50], [0], [500]])
def test_context_buckets_must_ascend_below_max_model_len(buckets: list[int]) -> None:
    with pytest.raises(ValueError, match=r"decode_context_length_buckets .*end in 400"):
        CompilePlan(config(), decode_context_length_buckets=buckets)


def test_a_shape_outside_the_plan_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"bucket=64.*is not in the compile plan of 7 shapes"):
        CompilePlan(config()).prefill(64, 0)
    with pytest.raises(RuntimeError, match=r"bucket=3.*is not in the compile plan"):
        CompilePlan(config(num_blocks=3)).decode(3, 10)


class _Reached:
    """Schedules without a model and collects the shapes of all steps."""

    def __init__(self, config: SchedulerConfig, plan: CompilePlan) -> None:
        self._config = config
        self._plan = plan
        self.shapes: set[GraphShape] = set()

    def serve(self, *bursts: list[tuple[list[int], int]]) -> None:
        """Serve requests (prompt, max_tokens), each burst when the one before is done."""
        scheduler = NeuronScheduler(self._config, NeuronPolicy(kv_admission="reserved"))
        for burst, requests in enumerate(bursts):
            for index, (prompt, max_tokens) in enumerate(requests):
                with suppress(RequestError):
                    scheduler.add_request(Request(f"{burst}-{index}", prompt, max_tokens))
            while scheduler.has_requests():
                self._step(scheduler)

    def desert(self, prompt: list[int], steps: int) -> None:
        """Serve a prompt with another request beside it, which is aborted after some steps."""
        scheduler = NeuronScheduler(self._config, NeuronPolicy(kv_admission="reserved"))
        for name, tokens in (("stays", prompt), ("goes", [9])):
            with suppress(RequestError):
                scheduler.add_request(Request(name, tokens, 1))
        for _ in range(steps):
            self._step(scheduler)
        scheduler.finish_requests("goes", RequestStatus.FINISHED_ABORTED)
        while scheduler.has_requests():
            self._step(scheduler)

    def _step(self, scheduler: NeuronScheduler) -> None:
        output = scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        cached = output.scheduled_cached_reqs
        prior = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        prior |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        sampled = []
        for req_id in ids:
            known = scheduler.requests[req_id].num_tokens
            complete = prior[req_id] + output.num_scheduled_tokens[req_id] == known
            sampled.append([1] if complete else [])
        padded = output.num_scheduled_tokens_padded
        if scheduler.state is SchedulerState.ACTIVE_PREFILL:
            assert padded is not None
            self.shapes |= {self._plan.prefill(padded[i], prior[i]) for i in ids}
        elif ids:
            self.shapes.add(self._plan.decode(len(ids), 1 + max(prior.values())))
        scheduler.update_from_output(output, ModelRunnerOutput(ids, sampled))


@settings(max_examples=12)
@given(
    max_num_seqs=st.integers(1, 3),
    budget=st.integers(3, 9),
    max_model_len=st.integers(2, 14),
    block_size=st.sampled_from([2, 4]),
    num_blocks=st.integers(2, 16),
    caching=st.booleans(),
    chunked=st.booleans(),
    threshold=st.sampled_from([0, 2]),
    context_bucket=st.integers(1, 13),
)
def test_the_plan_is_exactly_what_all_request_lengths_reach(
    max_num_seqs: int,
    budget: int,
    max_model_len: int,
    block_size: int,
    num_blocks: int,
    caching: bool,
    chunked: bool,
    threshold: int,
    context_bucket: int,
) -> None:
    budget = budget if chunked else max(budget, max_model_len)
    small = config(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=chunked,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        enable_prefix_caching=caching,
        long_prefill_token_threshold=threshold if chunked else 0,
        num_batched_tokens_buckets=range(1, min(budget, max_model_len) + 1),
        num_seqs_buckets=range(1, max_num_seqs + 1),
    )
    plan = CompilePlan(
        small,
        decode_context_length_buckets=[b for b in [context_bucket] if b < max_model_len],
    )
    reached = _Reached(small, plan)
    for length in range(1, max_model_len):
        # Alone, then behind a prompt of every length with the same beginning.
        for other in range(1, max_model_len):
            reached.serve([([5] * other, 1)], [([5] * length, 1)])
        # In batches of every size, as long as the cache allows.
        for size in range(1, max_num_seqs + 1):
            for max_tokens in range(1, max_model_len):
                batch = [([7 + i] * length, max_tokens) for i in range(size)]
                reached.serve(batch)
                # The longest beside as many of the shortest.
                reached.serve([batch[0], *(([7 + i], max_tokens) for i in range(1, size))])
        # The threshold cuts the prompts of requests that are not alone: until the other is aborted.
        for steps in (1, 2, max_model_len):
            reached.desert([5] * length, steps)
    assert reached.shapes == set(plan.shapes)
