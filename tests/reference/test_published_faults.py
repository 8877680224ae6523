"""Published faults of other attention stacks, with the numbers of their reports."""

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from segattn.reference.attention import (
    Float64,
    padded_prefill,
    paged_decode,
    segmented_attention,
    write_kv_cache,
)
from segattn.tests.reference.cases import dense, nan_caches, no_slots


def one_hot_rows(num_keys: int, num_heads: int = 1) -> Float64:
    """V whose output row is the attention weight of each key."""
    return np.broadcast_to(np.eye(num_keys), (num_heads, num_keys, num_keys)).copy()


def test_padding_slots_do_not_write_the_last_row() -> None:
    k_cache, v_cache = np.full((4, 1, 4, 2), 7.0), np.full((4, 1, 4, 2), 7.0)
    k = np.full((1, 8, 2), np.nan)
    k[:, :3] = 1.0
    slots = np.array([4, 5, 6] + [-1] * 5, np.int32)
    write_kv_cache(k, k, k_cache, v_cache, slots)
    for cache in (k_cache, v_cache):
        rows = cache.reshape(16, 2)
        np.testing.assert_array_equal(np.flatnonzero((rows != 7.0).any(1)), [4, 5, 6])


def test_a_row_with_nothing_to_attend_to_is_zero() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 8, 4)) for _ in range(3))
    unpadded, _, _ = padded_prefill(
        q[:, :3], k[:, :3], v[:, :3], *nan_caches(1, 1, 4, 4), no_slots(3), 3
    )
    q[:, 3:], k[:, 3:], v[:, 3:] = np.nan, np.nan, np.inf
    out, _, _ = padded_prefill(q, k, v, *nan_caches(1, 1, 4, 4), no_slots(8), 3)
    np.testing.assert_array_equal(out[:, :3], unpadded)
    np.testing.assert_array_equal(out[:, 3:], 0.0)


@pytest.mark.parametrize("garbage", [np.nan, 1e30, 0.0])
def test_the_unused_end_of_the_last_block_does_not_matter(garbage: float) -> None:
    rng = np.random.default_rng(1)
    keys, values = rng.standard_normal((5, 4)), rng.standard_normal((5, 4))
    k_cache, v_cache = nan_caches(8, 1, 4, 4)
    k_cache[[2, 7]], v_cache[[2, 7]] = garbage, np.inf if garbage else 0.0
    k_cache[2, 0], v_cache[2, 0] = keys[:4], values[:4]
    k_cache[7, 0, 0], v_cache[7, 0, 0] = keys[4], values[4]
    table = np.array([2, 7, 0, 0], np.int32)
    query = rng.standard_normal((1, 1, 1, 4))
    decoded = paged_decode(query, k_cache, v_cache, table[None], np.array([5], np.int32))
    np.testing.assert_allclose(decoded[0], dense(query[0], keys[None], values[None], 4))
    q, k, v = (rng.standard_normal((1, 3, 4)) for _ in range(3))
    chunk = segmented_attention(q, k, v, k_cache, v_cache, table, 5, 3)
    every_k, every_v = np.concatenate([keys[None], k], 1), np.concatenate([values[None], v], 1)
    np.testing.assert_allclose(chunk, dense(q, every_k, every_v, 5))


def test_the_causal_mask_is_aligned_to_the_end() -> None:
    k_cache, v_cache = nan_caches(1, 1, 4, 5)
    k_cache[0, 0, :3], v_cache[0, 0, :3] = 0.0, np.eye(5)[:3]
    q, k, v = np.ones((1, 2, 5)), np.zeros((1, 2, 5)), np.eye(5)[None, 3:]
    out = segmented_attention(q, k, v, k_cache, v_cache, np.zeros(1, np.int32), 3, 2)
    np.testing.assert_allclose(out[0], [[0.25, 0.25, 0.25, 0.25, 0], [0.2] * 5], rtol=1e-15)


def test_queries_before_the_first_key_are_empty() -> None:
    k_cache, v_cache = nan_caches(1, 1, 2, 2)
    k_cache[:], v_cache[0, 0] = 0.0, np.eye(2)
    out = paged_decode(
        np.ones((1, 1, 5, 2)), k_cache, v_cache, np.zeros((1, 1), np.int32), np.array([2], np.int32)
    )
    np.testing.assert_array_equal(out[0, 0], [[0, 0], [0, 0], [0, 0], [1, 0], [0.5, 0.5]])


@pytest.mark.parametrize("window", [1, 4, 8, 100, None])
def test_a_window_counts_the_token_itself_in_prefill_and_decode(window: int | None) -> None:
    q = k = np.zeros((1, 8, 8))
    v = one_hot_rows(8)
    k_cache, v_cache = nan_caches(2, 1, 4, 8)
    slots = np.arange(8, dtype=np.int32)
    out, _, _ = padded_prefill(q, k, v, k_cache, v_cache, slots, 8, sliding_window=window)
    for position in range(8):
        first = 0 if window is None else max(0, position - window + 1)
        expected = [1 / (position - first + 1) if first <= j <= position else 0 for j in range(8)]
        np.testing.assert_allclose(out[0, position], expected, rtol=1e-15)
    decoded = paged_decode(
        np.zeros((1, 1, 1, 8)), k_cache, v_cache, np.array([[0, 1]], np.int32),
        np.array([8], np.int32), sliding_window=window,
    )  # fmt: skip
    np.testing.assert_array_equal(decoded[0, 0, 0], out[0, 7])


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(6, 2), (28, 4), (9, 3)])
def test_query_heads_read_their_kv_head_in_runs(num_q_heads: int, num_kv_heads: int) -> None:
    q, k = np.zeros((num_q_heads, 1, 1)), np.zeros((num_kv_heads, 1, 1))
    v = np.arange(num_kv_heads, dtype=float)[:, None, None]
    out, _, _ = padded_prefill(q, k, v, *nan_caches(1, num_kv_heads, 1, 1), no_slots(1), 1)
    group = num_q_heads // num_kv_heads
    expected = [float(j) for j in range(num_kv_heads) for _ in range(group)]
    assert out[:, 0, 0].tolist() == expected


def test_a_ratio_that_does_not_divide_is_refused() -> None:
    q, k = np.zeros((3, 1, 1)), np.zeros((2, 1, 1))
    with pytest.raises(ValueError, match=r"num_q_heads=3 .* num_kv_heads=2"):
        padded_prefill(q, k, k, *nan_caches(1, 2, 1, 1), no_slots(1), 1)


@pytest.mark.parametrize("score", [-60000.0, -1e30])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_very_negative_scores_still_beat_the_mask(score: float, dtype: npt.DTypeLike) -> None:
    q = np.full((1, 8, 1), score, dtype)
    k = np.ones((1, 8, 1), dtype)
    v = np.array([1.0, 3.0] + [np.nan] * 6, dtype).reshape(1, 8, 1)
    out, _, _ = padded_prefill(q, k, v, *nan_caches(1, 1, 1, 1), no_slots(8), 2, scale=1.0)
    assert out[0, 1, 0] == 2.0
