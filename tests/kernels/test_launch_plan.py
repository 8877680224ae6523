"""Prefill calls whose program would be too long: several launches of a shorter one."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels import backend, launch_plan, padded_prefill, segmented_attention
from segattn.kernels.launch_plan import LaunchPlan, ProgramShape, plan_launches
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    Options,
    assert_close,
    assert_same_rows,
    garbage,
    options,
    padded_rows,
    paged_tokens,
    seeds,
)

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...], str]]:
    """Kernel, shape of q and softmax of every launch of an attention kernel."""
    seen: list[tuple[str, tuple[int, ...], str]] = []
    run = backend.run

    def recording(kernel: Any, *args: Any) -> Any:
        modes = [a for a in args if isinstance(a, str)]
        if modes:
            seen.append((kernel.__name__, args[1].shape, modes[0]))
        return run(kernel, *args)

    monkeypatch.setattr("segattn.kernels.backend.run", recording)
    return seen


def limit(monkeypatch: pytest.MonkeyPatch, instructions: int) -> None:
    """Let programs have fewer instructions."""
    monkeypatch.setattr(launch_plan, "INSTRUCTION_LIMIT", instructions)


def shape(rows: int, softmax: str, segment: int | None = 2048, d: int = 128) -> ProgramShape:
    """A bf16 program on one core."""
    return ProgramShape(rows, d, 2, 1, softmax, None, segment, 32, False)


def test_programs_that_are_short_enough_are_launched_once() -> None:
    assert plan_launches(shape(2048, "auto"), 4, 1) == LaunchPlan(4, "auto")
    assert plan_launches(shape(128, "auto"), 32, 8) == LaunchPlan(32, "auto")


def test_kv_heads_are_launched_in_equal_parts() -> None:
    plan = plan_launches(shape(2048, "auto"), 32, 8)
    assert plan == LaunchPlan(4, "auto")
    assert plan_launches(shape(512, "auto"), 32, 8) == LaunchPlan(8, "auto")


def test_long_chunks_keep_the_heads_of_a_kv_head_together_where_only_bounded_is_short() -> None:
    assert plan_launches(shape(8192, "auto", None), 4, 1) == LaunchPlan(4, "bounded", 2)


def test_a_head_whose_program_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 300)
    with pytest.raises(ValueError, match=r"q: S=256 rows .* must be at most 300: call with fewer"):
        plan_launches(shape(256, "exact"), 2, 1)


@given(
    seed=seeds,
    heads=st.sampled_from([(6, 3), (4, 1), (3, 3), (8, 2)]),
    n=st.integers(0, 256),
    prior=st.sampled_from([0, 200, 700]),
    options=options,
    dtype=st.sampled_from([BF16, np.dtype(np.float32)]),
    most=st.sampled_from([1200, 2000]),
)
def test_several_launches_equal_the_reference(
    seed: int,
    heads: tuple[int, int],
    n: int,
    prior: int,
    options: Options,
    dtype: np.dtype[Any],
    most: int,
) -> None:
    rng = np.random.default_rng(seed)
    cache_dtype = options.cache_dtype(dtype)
    paged = paged_tokens(rng, [prior], heads[1], 64, 16, cache_dtype, holes=0.2, spare_blocks=40)
    k_cache = options.stored_keys(paged.k_cache)
    q = padded_rows(rng, heads[0], 256, n, 64, dtype)
    k, v = (padded_rows(rng, heads[1], 256, n, 64, dtype) for _ in range(2))
    arguments = {**options.arguments(rng, heads[0]), **options.scales(rng, heads[1], dtype)}
    with pytest.MonkeyPatch.context() as patch:
        limit(patch, most)
        if prior:
            call = (q, k, v, k_cache, paged.v_cache, paged.tables[0], prior, n)
            out = segmented_attention(*call, kv_segment_size=512, **arguments)
            expected = reference.segmented_attention(*call, **arguments)
        else:
            slots = np.full(256, -1, np.int32)
            slots[:n] = rng.permutation(len(paged.k_cache) * 16)[:n]
            wanted = k_cache.copy(), paged.v_cache.copy()
            caches = k_cache, paged.v_cache
            out, *_ = padded_prefill(q, k, v, *caches, slots, n, **arguments)
            expected, *_ = reference.padded_prefill(q, k, v, *wanted, slots, n, **arguments)
            for cache, right in zip(caches, wanted, strict=True):
                assert_same_rows(cache, right)
    assert_close(out[:, :n], expected[:, :n])
    np.testing.assert_array_equal(out[:, n:].astype(float), 0.0)


@pytest.mark.parametrize("hostile", [False, True])
def test_heads_that_fail_the_check_of_a_bounded_launch_are_launched_again(
    hostile: bool, monkeypatch: pytest.MonkeyPatch, launched: list[tuple[str, tuple[int, ...], str]]
) -> None:
    rng = np.random.default_rng(5)
    q, k, v = (padded_rows(rng, heads, 512, 512, 64, BF16) for heads in (4, 2, 2))
    if hostile:
        q[2:] *= BF16.type(64)  # the second KV head's
    caches = garbage(rng, (40, 2, 16, 64), BF16), garbage(rng, (40, 2, 16, 64), BF16)
    slots = np.arange(512, dtype=np.int32)
    two = ProgramShape(512, 64, 2, 1, "bounded", None, None, 16, False)
    limit(monkeypatch, launch_plan.program_length(two, 2, 2))
    assert plan_launches(ProgramShape(512, 64, 2, 1, "auto", None, None, 16, False), 4, 2) == (
        LaunchPlan(2, "bounded", 1)
    )
    out, *_ = padded_prefill(q, k, v, *caches, slots, 512)
    expected, *_ = reference.padded_prefill(q, k, v, *caches, slots, 512)
    assert_close(out, expected)
    again = [("chunk_attention_kernel", (1, 512, 64), "exact")] * 2 if hostile else []
    assert launched == [("chunk_attention_kernel", (2, 512, 64), "bounded")] * 2 + again


def test_a_failed_bounded_call_in_several_launches_has_written_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(6)
    q, k, v = (padded_rows(rng, 2, 512, 512, 64, BF16) for _ in range(3))
    q[1] *= BF16.type(64)
    caches = garbage(rng, (40, 2, 16, 64), BF16), garbage(rng, (40, 2, 16, 64), BF16)
    before = [cache.tobytes() for cache in caches]
    limit(monkeypatch, launch_plan.program_length(shape(512, "bounded", None, 64), 1, 1))
    with pytest.raises(FloatingPointError, match=r"head\(s\) \[1\] on"):
        padded_prefill(q, k, v, *caches, np.arange(512, dtype=np.int32), 512, softmax="bounded")
    assert [cache.tobytes() for cache in caches] == before
