"""Published bugs of other attention stacks, replayed on the kernels.

The numbers of the reports run literally on the reference, in
tests/reference/test_published_faults.py; here they take the nearest sizes that the kernels
support, with the same fault.
"""

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from segattn.kernels import padded_prefill, paged_decode, segmented_attention, write_kv_cache
from segattn.reference import attention as reference
from segattn.reference.attention import Array
from segattn.tests.kernels.cases import assert_close

D, ROWS = 64, 128


def cache(num_blocks: int, block_size: int = 16, heads: int = 1, fill: float = np.nan) -> Array:
    return np.full((num_blocks, heads, block_size, D), fill, np.float32)


def no_slots() -> Array:
    return np.full(ROWS, -1, np.int32)


def rows(fill: float, heads: int = 1) -> Array:
    return np.full((heads, ROWS, D), fill, np.float32)


def test_padding_slots_do_not_write_the_last_row() -> None:
    k_cache, v_cache = cache(4, fill=7.0), cache(4, fill=7.0)
    k = rows(np.nan)
    k[:, :3] = 1.0
    slots = no_slots()
    slots[:3] = [4, 5, 6]
    write_kv_cache(k, k, k_cache, v_cache, slots)
    for written in (k_cache, v_cache):
        changed = (written.reshape(64, D) != 7.0).any(1)
        np.testing.assert_array_equal(np.flatnonzero(changed), [4, 5, 6])


def test_a_row_with_nothing_to_attend_to_is_zero() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, ROWS, D)).astype(np.float32) for _ in range(3))
    unpadded, _, _ = padded_prefill(q, k, v, cache(1), cache(1), no_slots(), 3)
    q[:, 3:], k[:, 3:], v[:, 3:] = np.nan, np.nan, np.inf
    out, _, _ = padded_prefill(q, k, v, cache(1), cache(1), no_slots(), 3)
    np.testing.assert_array_equal(out[:, :3], unpadded[:, :3])
    np.testing.assert_array_equal(out[:, 3:], 0.0)


@pytest.mark.parametrize("garbage", [np.nan, 1e30, 0.0])
def test_the_unused_end_of_the_last_block_does_not_matter(garbage: float) -> None:
    rng = np.random.default_rng(1)
    k_cache, v_cache = cache(8, fill=garbage), cache(8, fill=np.inf if garbage else 0.0)
    for block, first, last in ((2, 0, 16), (7, 16, 20)):
        k_cache[block, 0, : last - first] = rng.standard_normal((last - first, D))
        v_cache[block, 0, : last - first] = rng.standard_normal((last - first, D))
    table, length = np.array([2, 7, 0, 0], np.int32), np.array([20], np.int32)
    query = rng.standard_normal((1, 1, 1, D)).astype(np.float32)
    arguments = (query, k_cache, v_cache, table[None], length)
    assert_close(paged_decode(*arguments), reference.paged_decode(*arguments))
    q, k, v = (rng.standard_normal((1, ROWS, D)).astype(np.float32) for _ in range(3))
    chunk = (q, k, v, k_cache, v_cache, table, 20, 3)
    assert_close(segmented_attention(*chunk), reference.segmented_attention(*chunk))


def test_the_causal_mask_is_aligned_to_the_end() -> None:
    k_cache, v_cache = cache(1), cache(1)
    k_cache[0, 0, :3], v_cache[0, 0, :3] = 0.0, np.eye(D)[:3]
    v = rows(0.0)
    v[0, :2] = np.eye(D)[3:5]
    table = np.zeros(1, np.int32)
    out = segmented_attention(rows(1.0), rows(0.0), v, k_cache, v_cache, table, 3, 2)
    np.testing.assert_allclose(out[0, 0, :6], [0.25, 0.25, 0.25, 0.25, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(out[0, 1, :6], [0.2, 0.2, 0.2, 0.2, 0.2, 0], rtol=1e-6)


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(6, 2), (28, 4), (9, 3)])
def test_query_heads_read_their_kv_head_in_runs(num_q_heads: int, num_kv_heads: int) -> None:
    q, k, v = rows(0.0, num_q_heads), rows(0.0, num_kv_heads), rows(0.0, num_kv_heads)
    v[:] = np.arange(num_kv_heads)[:, None, None]
    k_cache, v_cache = cache(1, heads=num_kv_heads), cache(1, heads=num_kv_heads)
    slots = no_slots()
    slots[0] = 0
    out, _, _ = padded_prefill(q, k, v, k_cache, v_cache, slots, 1)
    group = num_q_heads // num_kv_heads
    expected = [float(j) for j in range(num_kv_heads) for _ in range(group)]
    assert out[:, 0, 0].tolist() == expected
    table = np.zeros((1, 1), np.int32)
    decoded = paged_decode(q[None, :, :1], k_cache, v_cache, table, np.ones(1, np.int32))
    assert decoded[0, :, 0, 0].tolist() == expected


@pytest.mark.parametrize("score", [-60000.0, -1e30])
@pytest.mark.parametrize("scale", [1.0, 0.0625])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_very_negative_scores_still_beat_the_mask(
    score: float, scale: float, dtype: npt.DTypeLike
) -> None:
    q, k, v = (np.zeros((1, ROWS, D), dtype) for _ in range(3))
    q[..., 0], k[..., 0] = score, 1 / scale
    v[0, :2, 0], v[:, 2:] = [1.0, 3.0], np.nan
    caches = cache(1).astype(dtype), cache(1).astype(dtype)
    out, _, _ = padded_prefill(q, k, v, *caches, no_slots(), 2, scale=scale)
    assert out[0, 1, 0] == 2.0
    caches[0][0, 0, :2], caches[1][0, 0, :2] = k[0, :2], v[0, :2]
    table = np.zeros((1, 1), np.int32)
    decoded = paged_decode(q[None, :, :1], *caches, table, np.array([2], np.int32), scale=scale)
    assert decoded[0, 0, 0, 0] == 2.0


@pytest.mark.parametrize("window", [1, 4, 8, 100, None])
def test_a_window_counts_the_token_itself_in_prefill_and_decode(window: int | None) -> None:
    v = rows(0.0)
    v[0, :8] = np.eye(D)[:8]
    k_cache, v_cache = cache(1), cache(1)
    slots = no_slots()
    slots[:8] = np.arange(8)
    out, _, _ = padded_prefill(
        rows(0.0), rows(0.0), v, k_cache, v_cache, slots, 8, sliding_window=window
    )
    for position in range(8):
        first = 0 if window is None else max(0, position - window + 1)
        expected = np.zeros(8)
        expected[first : position + 1] = 1 / (position - first + 1)
        np.testing.assert_allclose(out[0, position, :8], expected, rtol=1e-6)
    decoded = paged_decode(
        np.zeros((1, 1, 1, D), np.float32), k_cache, v_cache, np.zeros((1, 1), np.int32),
        np.array([8], np.int32), sliding_window=window,
    )  # fmt: skip
    np.testing.assert_allclose(decoded[0, 0, 0], out[0, 7], rtol=1e-6)


def test_queries_before_the_first_key_are_empty() -> None:
    k_cache, v_cache = cache(1), cache(1)
    k_cache[0, 0, :2], v_cache[0, 0, :2] = 0.0, np.eye(D)[:2]
    q = np.ones((1, 1, 5, D), np.float32)
    out = paged_decode(q, k_cache, v_cache, np.zeros((1, 1), np.int32), np.array([2], np.int32))
    np.testing.assert_allclose(
        out[0, 0, :, :2], [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.5, 0.5]], rtol=1e-6
    )
