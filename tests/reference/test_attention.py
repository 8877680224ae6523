"""The reference against values worked by hand and one dense formula."""

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.reference.attention import (
    Array,
    padded_prefill,
    paged_decode,
    segmented_attention,
    write_kv_cache,
)
from segattn.tests.reference.cases import dense, nan_caches, no_slots


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


def test_a_cap_bends_scores_before_the_sink_joins() -> None:
    # 4 tanh(score / 4) of 0 and of 4 artanh(ln 3 / 4) is 0 and ln 3; the sink is not capped.
    q = np.ones((1, 2, 1))
    k = np.array([[[0.0], [4.0 * np.arctanh(np.log(3.0) / 4.0)]]])
    v = np.array([[[4.0], [8.0]]])
    sinks = np.array([np.log(6.0)])
    out, _, _, lse = padded_prefill(
        q, k, v, *nan_caches(1, 1, 2, 1), no_slots(2), 2, scale=1.0, softcap=4.0, sinks=sinks,
        return_lse=True,
    )  # fmt: skip
    np.testing.assert_allclose(out, [[[4.0 / 7.0], [(4.0 + 3 * 8.0) / 10.0]]], rtol=1e-14)
    np.testing.assert_allclose(lse, [[np.log(7.0), np.log(10.0)]], rtol=1e-14)


def test_values_may_be_features_of_the_keys() -> None:
    # Keys (3, 0) and (5, ln 3) against the query (0, 1): weights 1/4 and 3/4 of 3 and 5, doubled.
    k_cache = np.array([[[[3.0, 0.0], [5.0, np.log(3.0)]]]])
    call = (np.array([[[[0.0, 1.0]]]]), k_cache, None, np.zeros((1, 1), np.int32), np.array([2]))
    out = paged_decode(*call, value_dim=1, scale=1.0, v_scale=2.0)
    np.testing.assert_allclose(out, [[[[9.0]]]], rtol=1e-15)


def test_a_tree_of_drafts_worked_by_hand() -> None:
    # One token before the drafts, then a root and two children; all scores are 0, so that each
    # query has the mean of what it sees.
    k_cache, v_cache = np.zeros((1, 1, 4, 1)), np.array([[[[1.0], [2.0], [4.0], [8.0]]]])
    mask = np.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool)
    call = (np.ones((1, 1, 3, 1)), k_cache, v_cache, np.zeros((1, 1), np.int32), np.array([4]))
    out = paged_decode(*call, tree_mask=mask)
    np.testing.assert_allclose(out[0, 0, :, 0], [3 / 2, 7 / 3, 11 / 3], rtol=1e-15)
    # The window of two hides what lies two positions before a query.
    out = paged_decode(*call, tree_mask=mask, sliding_window=2)
    np.testing.assert_allclose(out[0, 0, :, 0], [3 / 2, 3.0, 8.0], rtol=1e-15)


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


def test_keys_of_a_pre_transposed_cache_are_its_columns() -> None:
    # One block of two tokens with the keys (0, ln 3) and (0, 0); the query sees only feature 1.
    k_cache = np.array([[[[7.0, 9.0], [np.log(3.0), 0.0]]]])  # [1, 1, d, block_size]
    v_cache = np.array([[[[1.0, 0.0], [0.0, 1.0]]]])
    q = np.array([[[0.0, 1.0]]])
    out = paged_decode(
        q[None], k_cache, v_cache, np.zeros((1, 1), np.int32), np.array([2], np.int32),
        scale=1.0, k_pre_transposed=True,
    )  # fmt: skip
    np.testing.assert_allclose(out, [[[[0.75, 0.25]]]], rtol=1e-15)


def test_writes_into_a_pre_transposed_cache_store_columns() -> None:
    k = np.array([[[1.0, 2.0, 3.0]]])
    k_cache, v_cache = np.zeros((2, 1, 3, 4)), np.zeros((2, 1, 4, 3))
    write_kv_cache(k, k, k_cache, v_cache, np.array([6], np.int32), k_pre_transposed=True)
    np.testing.assert_array_equal(k_cache[1, 0, :, 2], [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(v_cache[1, 0, 2], [1.0, 2.0, 3.0])
    assert np.count_nonzero(k_cache) == 3


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
    softcap=st.sampled_from([0.0, 0.7]),
    causal=st.booleans(),
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
    softcap: float,
    causal: bool,
) -> None:
    """Whole prefill; prefill of the prior then a chunk; the same chunk as a decode with T rows."""
    rng = np.random.default_rng(seed)
    d, total, rows = 3, prior + num_tokens, num_tokens + padding
    window = window if causal else None
    q = rng.standard_normal((group * num_kv_heads, total, d))
    k, v = (rng.standard_normal((num_kv_heads, total, d)) for _ in range(2))
    sinks = rng.standard_normal(len(q)) if with_sinks else None
    expected = dense(q, k, v, 0, window, sinks, softcap, causal)

    num_blocks = -(-total // block_size)
    table = rng.permutation(num_blocks + 2)[:num_blocks].astype(np.int32)
    slots = table[np.arange(total) // block_size] * block_size + np.arange(total) % block_size
    k_cache, v_cache = nan_caches(num_blocks + 2, num_kv_heads, block_size, d)

    def padded(x: Array) -> Array:
        return np.concatenate([x, np.full((len(x), padding, d), np.nan)], 1)

    out, _, _ = padded_prefill(
        padded(q), padded(k), padded(v), *nan_caches(1, num_kv_heads, 1, d),
        no_slots(total + padding), total, sliding_window=window, sinks=sinks, softcap=softcap,
        causal=causal,
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
        softcap=softcap,
        causal=causal,
    )
    np.testing.assert_allclose(out[:, :num_tokens], expected[:, prior:], rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(out[:, num_tokens:], 0.0)

    write_kv_cache(k[:, prior:], v[:, prior:], k_cache, v_cache, slots[prior:])
    tables = np.stack([table, np.full(num_blocks, -1, np.int32)])
    decoded = paged_decode(
        np.stack([chunk_q, np.full((len(q), rows, d), np.nan)]), k_cache, v_cache, tables,
        np.array([total, 0], np.int32), query_lens=np.array([num_tokens, 0], np.int32),
        sliding_window=window, sinks=sinks, softcap=softcap, causal=causal,
    )  # fmt: skip
    real = decoded[0, :, :num_tokens]
    np.testing.assert_allclose(real, expected[:, prior:], rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(decoded[0, :, num_tokens:], 0.0)
    np.testing.assert_array_equal(decoded[1], 0.0)

    if not causal:
        crossed = segmented_attention(
            chunk_q, None, None, k_cache, v_cache, table, total, num_tokens, causal=False,
            sinks=sinks, softcap=softcap,
        )  # fmt: skip
        np.testing.assert_array_equal(crossed, decoded[0])
