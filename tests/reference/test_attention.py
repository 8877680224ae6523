"""The reference against values worked by hand, published faults and one dense formula."""

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.reference.attention import (
    Array,
    Float64,
    padded_prefill,
    paged_decode,
    segmented_attention,
    write_kv_cache,
)


def one_hot_rows(num_keys: int, num_heads: int = 1) -> Float64:
    """V whose output row is the attention weight of each key."""
    return np.broadcast_to(np.eye(num_keys), (num_heads, num_keys, num_keys)).copy()


def nan_caches(num_blocks: int, heads: int, block_size: int, d: int) -> tuple[Array, Array]:
    shape = (num_blocks, heads, block_size, d)
    return np.full(shape, np.nan), np.full(shape, np.nan)


def no_slots(num_rows: int) -> npt.NDArray[np.int32]:
    return np.full(num_rows, -1, np.int32)


def test_two_keys_worked_by_hand() -> None:
    # Scores of row 1 are 0 and ln 3, so the weights are 1/4 and 3/4.
    q = np.ones((1, 2, 1))
    k = np.array([[[0.0], [np.log(3.0)]]])
    v = np.array([[[4.0], [8.0]]])
    caches = nan_caches(1, 1, 2, 1)
    out, _, _ = padded_prefill(q, k, v, *caches, no_slots(2), 2, scale=1.0)
    np.testing.assert_allclose(out, [[[4.0], [7.0]]], rtol=1e-15)


def test_scale_defaults_to_one_over_the_root_of_the_head_size() -> None:
    q, k = (
        np.full((1, 1, 4), 2.0),
        np.array([[[0.0] * 4], [[np.log(3.0) / 4] * 4]]).reshape(1, 2, 4),
    )
    # score of key 1 = 0.5 * 2 * ln 3 = ln 3
    k_cache, v_cache = nan_caches(1, 1, 2, 4)
    k_cache[0], v_cache[0, 0] = k, [[4.0] * 4, [8.0] * 4]
    out = paged_decode(
        q[None], k_cache, v_cache, np.zeros((1, 1), np.int32), np.array([2], np.int32)
    )
    np.testing.assert_allclose(out, np.full((1, 1, 1, 4), 7.0), rtol=1e-15)


def test_a_sink_takes_its_share_of_the_sum() -> None:
    # Weights e^0 and sink e^ln 3: the only key keeps 1/4.
    q, k, v = np.ones((1, 1, 1)), np.zeros((1, 1, 1)), np.full((1, 1, 1), 8.0)
    sinks = np.array([np.log(3.0)])
    out, _, _ = padded_prefill(q, k, v, *nan_caches(1, 1, 2, 1), no_slots(1), 1, sinks=sinks)
    np.testing.assert_allclose(out, [[[2.0]]], rtol=1e-15)


def test_prior_keys_come_through_the_block_table() -> None:
    k_cache, v_cache = nan_caches(4, 1, 2, 3)
    k_cache[3, 0], v_cache[3, 0] = 0.0, [[1.0, 0, 0], [0, 1.0, 0]]
    q, k, v = np.zeros((1, 1, 3)), np.zeros((1, 1, 3)), np.array([[[0, 0, 1.0]]])
    out = segmented_attention(q, k, v, k_cache, v_cache, np.array([3, -1], np.int32), 2, 1)
    np.testing.assert_allclose(out, np.full((1, 1, 3), 1 / 3), rtol=1e-15)


def test_an_absent_block_inside_the_prior_is_no_key() -> None:
    k_cache, v_cache = nan_caches(4, 1, 1, 3)
    k_cache[2], v_cache[2, 0, 0] = 0.0, [0, 1.0, 0]
    q, k, v = np.zeros((1, 1, 3)), np.zeros((1, 1, 3)), np.array([[[0, 0, 1.0]]])
    out = segmented_attention(q, k, v, k_cache, v_cache, np.array([-1, 2], np.int32), 2, 1)
    np.testing.assert_allclose(out, [[[0, 0.5, 0.5]]], rtol=1e-15)


def test_fp8_rows_are_multiplied_by_their_scale() -> None:
    shape = (1, 2, 1, 1)
    k_cache = np.ones(shape, ml_dtypes.float8_e4m3fn)
    v_cache = np.full(shape, 2.0).astype(ml_dtypes.float8_e4m3fn)
    out = paged_decode(
        np.ones((1, 2, 1, 1)), k_cache, v_cache, np.zeros((1, 1), np.int32), np.ones(1, np.int32),
        v_scale=np.array([0.5, 3.0]),
    )  # fmt: skip
    np.testing.assert_array_equal(out[0, :, 0, 0], [1.0, 6.0])


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3])
def test_fp8_writes_divide_by_the_scale_and_stay_within_240(dtype: npt.DTypeLike) -> None:
    k = np.array([[[1.0], [1000.0], [-1000.0]]])
    k_cache, v_cache = np.zeros((1, 1, 4, 1), dtype), np.zeros((1, 1, 4, 1), dtype)
    write_kv_cache(k, k, k_cache, v_cache, np.array([2, 0, 1], np.int32), k_scale=0.5, v_scale=4.0)
    np.testing.assert_array_equal(k_cache.astype(float).ravel(), [240.0, -240.0, 2.0, 0.0])
    np.testing.assert_array_equal(v_cache.astype(float).ravel(), [240.0, -240.0, 0.25, 0.0])


def test_caches_are_updated_in_place_and_returned() -> None:
    k_cache, v_cache = nan_caches(2, 1, 2, 1)
    k = np.array([[[5.0]]])
    returned = write_kv_cache(k, k, k_cache, v_cache, np.array([3], np.int32))
    assert returned[0] is k_cache
    assert returned[1] is v_cache
    assert k_cache[1, 0, 1, 0] == 5.0


# Published faults, with the numbers of their reports.


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


def dense(
    q: Array, k: Array, v: Array, prior: int, window: int | None = None, sinks: Array | None = None
) -> Float64:
    """Whole-matrix softmax attention; query i stands at prior + i, key j at j."""
    group = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
    scores = np.einsum("hqd,hkd->hqk", q, k) / np.sqrt(q.shape[2])
    behind = prior + np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])
    visible = (behind >= 0) & (behind < (np.inf if window is None else window))
    weights = np.where(visible, np.exp(scores), 0.0)
    total = weights.sum(2, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks)[:, None, None]
    return np.asarray(np.einsum("hqk,hkd->hqd", weights, v) / total)


@given(
    seed=st.integers(0, 2**32 - 1),
    group=st.integers(1, 3),
    num_kv_heads=st.integers(1, 2),
    prior=st.integers(0, 9),
    num_tokens=st.integers(1, 5),
    padding=st.integers(0, 3),
    block_size=st.integers(1, 4),
    window=st.none() | st.integers(1, 15),
    with_sinks=st.booleans(),
)
def test_every_path_to_the_same_tokens_is_the_dense_formula(
    seed: int,
    group: int,
    num_kv_heads: int,
    prior: int,
    num_tokens: int,
    padding: int,
    block_size: int,
    window: int | None,
    with_sinks: bool,
) -> None:
    """Whole prefill; prefill of the prior then a chunk; the same chunk as a decode with T rows."""
    rng = np.random.default_rng(seed)
    d, total, rows = 3, prior + num_tokens, num_tokens + padding
    q = rng.standard_normal((group * num_kv_heads, total, d))
    k, v = (rng.standard_normal((num_kv_heads, total, d)) for _ in range(2))
    sinks = rng.standard_normal(len(q)) if with_sinks else None
    expected = dense(q, k, v, 0, window, sinks)

    num_blocks = -(-total // block_size)
    table = rng.permutation(num_blocks + 2)[:num_blocks].astype(np.int32)
    slots = table[np.arange(total) // block_size] * block_size + np.arange(total) % block_size
    k_cache, v_cache = nan_caches(num_blocks + 2, num_kv_heads, block_size, d)

    def padded(x: Array) -> Array:
        return np.concatenate([x, np.full((len(x), padding, d), np.nan)], 1)

    out, _, _ = padded_prefill(
        padded(q), padded(k), padded(v), *nan_caches(1, num_kv_heads, 1, d),
        no_slots(total + padding), total, sliding_window=window, sinks=sinks,
    )  # fmt: skip
    np.testing.assert_allclose(out[:, :total], expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(out[:, total:], 0.0)

    write_kv_cache(k[:, :prior], v[:, :prior], k_cache, v_cache, slots[:prior])
    chunk_q, chunk_k, chunk_v = (padded(x[:, prior:]) for x in (q, k, v))
    out = segmented_attention(
        chunk_q,
        chunk_k,
        chunk_v,
        k_cache,
        v_cache,
        table,
        prior,
        num_tokens,
        sliding_window=window,
        sinks=sinks,
    )
    np.testing.assert_allclose(out[:, :num_tokens], expected[:, prior:], rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(out[:, num_tokens:], 0.0)

    write_kv_cache(k[:, prior:], v[:, prior:], k_cache, v_cache, slots[prior:])
    tables = np.stack([table, np.full(num_blocks, -1, np.int32)])
    decoded = paged_decode(
        np.stack([chunk_q, np.full((len(q), rows, d), np.nan)]), k_cache, v_cache, tables,
        np.array([total, 0], np.int32), query_lens=np.array([num_tokens, 0], np.int32),
        sliding_window=window, sinks=sinks,
    )  # fmt: skip
    np.testing.assert_allclose(decoded[0, :, :num_tokens], expected[:, prior:], rtol=1e-12)
    np.testing.assert_array_equal(decoded[0, :, num_tokens:], 0.0)
    np.testing.assert_array_equal(decoded[1], 0.0)
