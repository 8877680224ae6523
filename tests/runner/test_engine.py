"""The engine on the random model: the same greedy tokens however requests are served together."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segattn.runner.engine import Engine
from segattn.runner.llama import Llama
from segattn.runner.step import Step
from segattn.scheduler import NeuronPolicy, Request, RequestError, SchedulerConfig
from segattn.tests.runner.random_model import CONFIG, random_model
from segattn.tests.runner.runner_steps import greedy_tokens

MODEL = random_model()
RNG = np.random.default_rng(7)
PROMPTS = {f"r{n}": RNG.integers(0, CONFIG.vocab_size, n).tolist() for n in (3, 17, 32, 45)}
EXPECTED = {name: greedy_tokens(MODEL, prompt, 6) for name, prompt in PROMPTS.items()}


def config(**changed: Any) -> SchedulerConfig:
    """A configuration in which all prompts fit."""
    values: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "max_model_len": 128,
        "block_size": 16,
        "num_blocks": 40,
    }
    return SchedulerConfig(**(values | changed))


def serve(engine: Engine, names: list[str], max_tokens: int = 6, **request: Any) -> list[Step]:
    """Serve prompts by name; returns the steps."""
    for name in names:
        engine.add_request(Request(name, PROMPTS[name], max_tokens, **request))
    return list(engine.run())


def tokens(engine: Engine) -> dict[str, list[int]]:
    """What each request produced."""
    return {name: completion.token_ids for name, completion in engine.completions.items()}


@settings(max_examples=6)
@given(
    order=st.permutations(sorted(PROMPTS)).map(lambda names: names[:3]),
    max_num_seqs=st.integers(1, 4),
    chunk=st.sampled_from([4, 7, 16, 40, 128]),
    block_size=st.sampled_from([16, 32]),
    caching=st.booleans(),
)
def test_tokens_do_not_depend_on_batch_chunks_blocks_or_cache(
    order: list[str], max_num_seqs: int, chunk: int, block_size: int, caching: bool
) -> None:
    engine = Engine(
        MODEL,
        config(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=chunk,
            block_size=block_size,
            enable_prefix_caching=caching,
        ),
    )
    serve(engine, order)
    assert tokens(engine) == {name: EXPECTED[name] for name in order}
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("buckets", [[33, 128], [1, 2, 4, 128], [128]])
def test_tokens_do_not_depend_on_the_bucket_lists(buckets: list[int]) -> None:
    engine = Engine(MODEL, config(num_batched_tokens_buckets=buckets, num_seqs_buckets=[4]))
    steps = serve(engine, ["r3", "r45"])
    assert tokens(engine) == {"r3": EXPECTED["r3"], "r45": EXPECTED["r45"]}
    padded = {step.num_tokens_padded for step in steps if step.state == "ACTIVE_DECODE"}
    assert padded == {4}


def test_a_prefix_cache_hit_gives_the_same_tokens_from_fewer_computed_ones() -> None:
    engine = Engine(MODEL, config())
    serve(engine, ["r45"])
    engine.add_request(Request("again", PROMPTS["r45"], 6))
    first = next(engine.run())
    list(engine.run())
    # Two full blocks of 16 of the 44 tokens that may hit.
    assert (first.num_tokens, first.num_prior_tokens) == (13, 32)
    assert first.graph == "segmented_prefill_s128"
    assert engine.completions["again"].num_cached_tokens == 32
    assert tokens(engine)["again"] == EXPECTED["r45"]


def test_a_request_that_joins_later_changes_nothing() -> None:
    engine = Engine(MODEL, config())
    engine.add_request(Request("r17", PROMPTS["r17"], 6))
    for _ in range(3):
        engine.step()
    serve(engine, ["r32"])
    assert tokens(engine) == {"r17": EXPECTED["r17"], "r32": EXPECTED["r32"]}


def test_running_requests_that_lose_their_cache_are_resumed_with_the_same_tokens() -> None:
    engine = Engine(MODEL, config())
    for name in ("r17", "r32"):
        engine.add_request(Request(name, PROMPTS[name], 6))
    for _ in range(5):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    resumed = list(engine.run())
    # Four tokens of each are out and are computed anew with the prompt.
    assert [step.num_tokens for step in resumed[:2]] == [17 + 4, 32 + 4]
    assert tokens(engine) == {"r17": EXPECTED["r17"], "r32": EXPECTED["r32"]}


def test_steps_report_real_and_padded_counts_by_hand() -> None:
    engine = Engine(MODEL, config(max_num_batched_tokens=20, num_batched_tokens_buckets=[8, 20]))
    engine.add_request(Request("r45", PROMPTS["r45"], 2))
    engine.add_request(Request("r3", PROMPTS["r3"], 2))
    rows = [
        (s.state, s.graph, s.request_ids, s.num_tokens, s.num_tokens_padded, s.num_prior_tokens)
        for s in engine.run()
    ]
    assert rows == [
        ("ACTIVE_PREFILL", "prefill_s20", ("r45",), 20, 20, 0),
        ("ACTIVE_PREFILL", "segmented_prefill_s20", ("r45",), 20, 20, 20),
        ("ACTIVE_PREFILL", "segmented_prefill_s8", ("r45",), 5, 8, 40),
        ("ACTIVE_PREFILL", "prefill_s8", ("r3",), 3, 8, 0),
        ("ACTIVE_DECODE", "decode_b2_w8", ("r45", "r3"), 2, 2, 48),
    ]


def test_steps_report_queues_and_cache_usage() -> None:
    # One request at a time: 10 usable blocks, of which 45 + 1 tokens take 3.
    engine = Engine(MODEL, config(max_num_seqs=1, num_blocks=11))
    engine.add_request(Request("r45", PROMPTS["r45"], 2))
    engine.add_request(Request("r3", PROMPTS["r3"], 1))
    steps = list(engine.run())
    assert [(s.num_running, s.num_waiting) for s in steps] == [(1, 1), (0, 1), (0, 0)]
    assert [s.kv_cache_usage for s in steps] == pytest.approx([0.3, 0.3, 0.1])
    assert [s.index for s in steps] == [0, 1, 2]
    ends = [s.run_start_seconds + s.run_seconds for s in steps]
    assert all(end <= s.start_seconds for end, s in zip(ends, steps[1:], strict=False))
    assert all(s.start_seconds + s.prepare_seconds >= s.start_seconds for s in steps)


def test_a_stop_token_ends_a_request_and_frees_its_place() -> None:
    stop = EXPECTED["r17"][2]
    engine = Engine(MODEL, config(max_num_seqs=1))
    engine.add_request(Request("r17", PROMPTS["r17"], 6, eos_token_id=stop))
    serve(engine, ["r3"])
    assert tokens(engine) == {"r17": EXPECTED["r17"][:3], "r3": EXPECTED["r3"]}
    assert engine.completions["r17"].finish_reason == "stop"
    assert engine.completions["r3"].finish_reason == "length"


def test_logits_are_kept_only_when_asked_for() -> None:
    kept = Engine(MODEL, config(), keep_logits=True)
    serve(kept, ["r3"])
    logits = kept.completions["r3"].logits
    assert [int(row.argmax()) for row in logits] == EXPECTED["r3"]
    plain = Engine(MODEL, config())
    serve(plain, ["r3"])
    assert plain.completions["r3"].logits == []


BAD_REQUESTS = [
    (Request("r", [], 4), "prompt"),
    (Request("r", [1, CONFIG.vocab_size], 4), "prompt token id 320: must be within 0..319"),
    (Request("r", [1, -1], 4), "prompt token id -1: must be within 0..319"),
    (Request("r", [1] * 128, 4), "max_model_len=128"),
    (Request("r", [1] * 127, 4), "needs 8 KV blocks, the cache has 7"),
    (Request("r", [1], 0), "max_tokens"),
    (Request("taken", [1], 4), "already in use"),
]


@pytest.mark.parametrize(("request_", "message"), BAD_REQUESTS)
def test_a_bad_request_is_refused_and_others_go_on(request_: Request, message: str) -> None:
    engine = Engine(MODEL, config(num_blocks=8))
    engine.add_request(Request("taken", PROMPTS["r17"], 6))
    engine.step()
    with pytest.raises(RequestError, match=message):
        engine.add_request(request_)
    serve(engine, ["r3"])
    assert tokens(engine) == {"taken": EXPECTED["r17"], "r3": EXPECTED["r3"]}


def test_what_the_documented_policy_would_accept_is_refused_before_the_scheduler() -> None:
    engine = Engine(MODEL, config(num_blocks=8), policy=NeuronPolicy.documented())
    for prompt, message in (([1] * 128, "max_model_len=128"), ([1] * 127, "needs 8 KV blocks")):
        with pytest.raises(RequestError, match=message):
            engine.add_request(Request("r", prompt, 4))
    assert not engine.has_requests()


def test_an_id_of_a_finished_request_stays_taken() -> None:
    engine = Engine(MODEL, config())
    serve(engine, ["r3"])
    with pytest.raises(RequestError, match="'r3': this id is already in use"):
        engine.add_request(Request("r3", [1], 1))


def test_a_length_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len=513: must be at most 512"):
        Engine(MODEL, config(max_model_len=513, num_blocks=200))


def test_a_block_size_that_the_kernels_do_not_take_is_refused() -> None:
    with pytest.raises(
        ValueError, match="block_size=12: must be one of 1, 2, 4, 8, 16, 32, 64, 128, 256"
    ):
        Engine(MODEL, config(block_size=12))


def test_a_head_size_that_the_kernels_do_not_take_is_refused() -> None:
    odd = replace(CONFIG, head_dim=44)
    with pytest.raises(ValueError, match="the model's head_dim=44: must be a multiple of 8 within"):
        Engine(Llama(odd, MODEL.weights), config())


def test_a_cache_beyond_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_blocks=1000000000: a cache of .* GiB does not"):
        Engine(MODEL, config(num_blocks=10**9))


def test_requests_beyond_the_cache_wait_and_all_finish() -> None:
    # 8 usable blocks hold one request of 128 tokens at a time.
    engine = Engine(MODEL, config(num_blocks=9), policy=NeuronPolicy(kv_admission="worst_case"))
    steps = serve(engine, sorted(PROMPTS))
    assert tokens(engine) == EXPECTED
    assert {len(step.request_ids) for step in steps} == {1}


def test_bfloat16_runs_end_to_end() -> None:
    model = Llama(CONFIG, MODEL.weights, "bfloat16")
    engine = Engine(model, config())
    serve(engine, ["r17"])
    assert engine.runner.cache.keys.dtype == model.dtype
    assert tokens(engine)["r17"] == greedy_tokens(model, PROMPTS["r17"], 6)


@settings(max_examples=10)
@given(
    max_num_seqs=st.integers(1, 3),
    chunk=st.integers(3, 24),
    max_model_len=st.integers(4, 40),
    num_blocks=st.integers(4, 14),
    caching=st.booleans(),
    lengths=st.lists(st.integers(1, 39), min_size=1, max_size=4),
)
def test_no_step_leaves_the_compile_plan(
    max_num_seqs: int,
    chunk: int,
    max_model_len: int,
    num_blocks: int,
    caching: bool,
    lengths: list[int],
) -> None:
    """A step outside the plan raises, so finishing everything is the claim."""
    largest = min(chunk, max_model_len)
    engine = Engine(
        MODEL,
        config(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=chunk,
            max_model_len=max_model_len,
            block_size=16,
            num_blocks=num_blocks,
            enable_prefix_caching=caching,
            num_batched_tokens_buckets=sorted({1, max(largest // 2, 1), largest}),
        ),
    )
    accepted = []
    for index, length in enumerate(lengths):
        request = Request(str(index), [5] * length, 3)
        try:
            engine.add_request(request)
        except RequestError:
            continue
        accepted.append(request.request_id)
    list(engine.run())
    assert all(engine.completions[name].finish_reason == "length" for name in accepted)
