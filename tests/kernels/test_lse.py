"""return_lse and merge_attention: any partition of the keys gives what the whole gives."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from segattn import kernels
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import Options, block_sizes, dtypes, gqa, options, seeds

BF16 = ml_dtypes.bfloat16
LSE_TOLERANCE = {np.dtype(np.float32): 1e-5, np.dtype(np.float16): 4e-3, np.dtype(BF16): 3e-2}
"""Absolute: rounded weights change the sum by half a unit in their last place at most, and rounded
fp8 scales the scores."""


def check_lse(found: Any, expected: Any, dtype: Any) -> None:
    """Rows without a key are -inf, the others close."""
    assert found.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))
    seen = ~np.isneginf(expected)
    np.testing.assert_allclose(
        found[seen], expected[seen], rtol=1e-5, atol=LSE_TOLERANCE[np.dtype(dtype)]
    )


def decode_call(
    rng: np.random.Generator, dtype: Any, heads: tuple[int, int], block_size: int, option: Options
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of paged_decode: requests of all lengths, holes, NaN where nothing is read."""
    num_heads, num_kv_heads = heads
    batch, most_queries, width, d = 4, 2, 12, 64
    num_blocks = batch * width + 1
    cached = rng.standard_normal((2, num_blocks, num_kv_heads, block_size, d)) * 2
    tables = rng.permutation(num_blocks - 1).reshape(batch, width).astype(np.int32)
    cache_type = option.cache_dtype(dtype)
    cached[:, num_blocks - 1] = 127 if cache_type is np.int8 else np.nan
    tables[rng.random(tables.shape) < 0.1] = -1
    lengths = np.array([0, 1, *rng.integers(2, width * block_size, 2)], np.int32)
    k_cache, v_cache = (each.astype(cache_type) for each in cached)
    q = rng.standard_normal((batch, num_heads, most_queries, d)).astype(dtype)
    counts = np.minimum(lengths, rng.integers(0, most_queries + 1, batch)).astype(np.int32)
    given_options = option.arguments(rng, num_heads) | option.scales(rng, num_kv_heads, dtype)
    call = [q, option.stored_keys(k_cache), v_cache, tables, lengths]
    return call, {"query_lens": counts, **given_options}


@settings(max_examples=25, deadline=None)
@given(seed=seeds, dtype=dtypes, heads=gqa, block_size=block_sizes, option=options)
def test_decode_gives_the_logarithm_of_every_sum(
    seed: int, dtype: Any, heads: tuple[int, int], block_size: int, option: Options
) -> None:
    call, named = decode_call(np.random.default_rng(seed), dtype, heads, block_size, option)
    out, lse = kernels.paged_decode(*call, **named, return_lse=True)
    _, expected = reference.paged_decode(*call, **named, return_lse=True)
    check_lse(lse, expected, dtype)
    np.testing.assert_array_equal(out, kernels.paged_decode(*call, **named))


@settings(max_examples=20, deadline=None)
@given(seed=seeds, dtype=dtypes, heads=gqa, option=options, parts=st.integers(1, 4))
def test_any_partition_of_a_context_gives_the_whole(
    seed: int, dtype: Any, heads: tuple[int, int], option: Options, parts: int
) -> None:
    rng = np.random.default_rng(seed)
    call, named = decode_call(rng, dtype, heads, 16, option)
    sinks = named.pop("sinks")
    expected, expected_lse = reference.paged_decode(*call, **named, sinks=sinks, return_lse=True)
    owner = rng.integers(0, parts, call[3].shape)
    found = []
    for part in range(parts):
        tables = np.where(owner == part, call[3], -1).astype(np.int32)
        seen = [*call[:3], tables, call[4]]
        found.append(kernels.paged_decode(*seen, **named, return_lse=True))
    outs, lses = (np.stack(each) for each in zip(*found, strict=True))
    out, lse = kernels.merge_attention(outs, lses, sinks=sinks, lnc=option.lnc)
    check_lse(lse, expected_lse, dtype)
    assert out.dtype == dtype
    # Each part is rounded once more than the whole.
    error = np.linalg.norm(out.astype(np.float64) - expected)
    allowed = {4: 2e-5, 2: 2.5e-2 if dtype is BF16 else 4e-3}[np.dtype(dtype).itemsize]
    assert error <= allowed * np.linalg.norm(expected)


@settings(max_examples=25, deadline=None)
@given(
    seed=seeds, dtype=dtypes, heads=gqa, option=options, prior=st.integers(0, 700),
    num_tokens=st.integers(0, 256), softmax=st.sampled_from(["auto", "exact"]),
)  # fmt: skip
@example(0, BF16, (4, 2), Options(None, True, None, False, 2, False, False, None), 0, 100, "auto")
def test_prefill_gives_the_logarithm_of_every_sum(
    seed: int, dtype: Any, heads: tuple[int, int], option: Options, prior: int, num_tokens: int,
    softmax: str,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    rows, d, width = 256, 64, 700 // 16 + 1
    q = rng.standard_normal((num_heads, rows, d)).astype(dtype)
    k, v = (rng.standard_normal((num_kv_heads, rows, d)).astype(dtype) for _ in range(2))
    for each in (q, k, v):
        each[:, num_tokens:] = np.nan
    cached = rng.standard_normal((2, width + 1, num_kv_heads, 16, d)) * 2
    k_cache, v_cache = (each.astype(option.cache_dtype(dtype)) for each in cached)
    table = np.where(rng.random(width) < 0.1, -1, rng.permutation(width + 1)[:width])
    call = [
        q, k, v, option.stored_keys(k_cache), v_cache, table.astype(np.int32), prior, num_tokens,
    ]  # fmt: skip
    named = option.arguments(rng, num_heads) | option.scales(rng, num_kv_heads, dtype)
    out, lse = kernels.segmented_attention(*call, **named, softmax=softmax, return_lse=True)
    _, expected = reference.segmented_attention(*call, **named, return_lse=True)
    check_lse(lse, expected, dtype)
    np.testing.assert_array_equal(out, kernels.segmented_attention(*call, **named, softmax=softmax))


def test_padded_prefill_gives_it_after_the_caches() -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((heads, 384, 64)).astype(BF16) for heads in (4, 2, 2))
    slots = np.full(384, -1, np.int32)
    slots[:300] = rng.permutation(640)[:300]
    sinks = np.array([-np.inf, 2.0, -3.0, 500.0], np.float32)
    for lnc in (1, 2):
        k_cache, v_cache = (np.zeros((20, 2, 32, 64), BF16) for _ in range(2))
        _, _, _, lse = kernels.padded_prefill(
            q, k, v, k_cache, v_cache, slots, 300, sinks=sinks, lnc=lnc, return_lse=True
        )
        expected = reference.padded_prefill(
            q, k, v, k_cache, v_cache, slots, 300, sinks=sinks, return_lse=True
        )[3]
        check_lse(lse, expected, BF16)


def test_a_fallback_of_the_bounded_softmax_gives_it_too() -> None:
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((1, 128, 64)).astype(BF16) for _ in range(3))
    q[0, 100] *= 90.0
    cache = (rng.standard_normal((40, 1, 16, 64)) * 3).astype(BF16)
    call = (q, k, v, cache, cache, np.arange(40, dtype=np.int32), 640, 128)
    with pytest.raises(FloatingPointError):
        kernels.segmented_attention(*call, softmax="bounded")
    _, lse = kernels.segmented_attention(*call, return_lse=True)
    check_lse(lse, reference.segmented_attention(*call, return_lse=True)[1], BF16)


def test_a_merge_takes_every_lse() -> None:
    rng = np.random.default_rng(5)
    outs = rng.standard_normal((3, 2, 200, 80)).astype(np.float32)
    lses = (rng.standard_normal((3, 2, 200)) * 200).astype(np.float32)
    lses[rng.random(lses.shape) < 0.5] = -np.inf
    outs[np.isneginf(lses)] = 0.0
    sinks = np.array([-np.inf, 300.0], np.float32)
    for chosen in (None, sinks):
        out, lse = kernels.merge_attention(outs, lses, sinks=chosen)
        expected, expected_lse = reference.merge_attention(outs, lses, sinks=chosen)
        assert np.isneginf(expected_lse).any()
        check_lse(lse, expected_lse, np.float32)
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("outs", "lses", "said"),
    [
        (np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.float32), r"\[N, \.\.\., H, S, d\]"),
        (np.zeros((2, 1, 3, 4), np.float32), np.zeros((2, 1, 4), np.float32), "lses: shape"),
        (np.zeros((2, 1, 3, 4), np.float32), np.zeros((2, 1, 3)), "lses: dtype float64"),
        (np.zeros((2, 1, 3, 4)), np.zeros((2, 1, 3), np.float32), "dtype of outs"),
        (np.zeros((129, 1, 3, 4), np.float32), np.zeros((129, 1, 3), np.float32), "129 sets"),
        (np.zeros((2, 1, 3, 600), np.float32), np.zeros((2, 1, 3), np.float32), "head size 600"),
        (np.zeros((2, 1, 0, 4), np.float32), np.zeros((2, 1, 0), np.float32), "0 rows"),
    ],
)
def test_a_merge_says_what_it_does_not_take(outs: Any, lses: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kernels.merge_attention(outs, lses)
