"""The exact softmax where cached keys are absent: their place must not count for the maximum."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segattn.kernels import segmented_attention
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    Array,
    assert_close,
    garbage,
    padded_rows,
    paged_tokens,
    relative_error,
    seeds,
)

BF16 = ml_dtypes.bfloat16


def lowered(array: Array, amount: float) -> Array:
    """The same with `amount` as the first feature of every finite row."""
    array = array.copy()
    finite = np.isfinite(array.astype(np.float32)).all(-1)
    array[finite, 0] = amount
    return array


@pytest.mark.parametrize("kept", ["none", "first", "middle", "last", "every third"])
@pytest.mark.parametrize(
    ("prior", "window", "segment", "heads", "fp8", "k_pre_transposed"),
    [
        (1100, None, 512, 1, False, False),
        (1100, None, 256, 1, True, False),
        (1100, None, 512, 1, False, True),
        (1300, None, 1024, 9, False, False),
        (1100, 700, 512, 2, False, False),
        (1100, 130, 512, 1, False, True),
        (5000, 4700, 1024, 1, False, False),
    ],
)
def test_scores_far_below_zero_keep_their_weights(
    kept: str,
    prior: int,
    window: int | None,
    segment: int,
    heads: int,
    fp8: bool,
    k_pre_transposed: bool,
) -> None:
    """Scores of -300 or less: a key of zeros in an absent one's place would leave no weight."""
    rng = np.random.default_rng(prior)
    n = 250
    paged = paged_tokens(rng, [prior], 1, 64, 16, BF16)
    table = paged.tables[0].copy()
    blocks = np.arange(-(-prior // 16))
    present = {
        "none": blocks < 0,
        "first": blocks < 5,
        "middle": abs(blocks - len(blocks) // 2) < 3,
        "last": blocks >= len(blocks) - 3,
        "every third": blocks % 3 == 0,
    }[kept]
    table[: len(blocks)][~present] = -1
    options: dict[str, Any] = {"sliding_window": window, "k_pre_transposed": k_pre_transposed}
    k_cache, v_cache = lowered(paged.k_cache, 80), paged.v_cache
    if fp8:
        k_cache, v_cache = (
            np.clip(c.astype(np.float32), -240, 240).astype(ml_dtypes.float8_e4m3fn)
            for c in (k_cache, v_cache)
        )
        options |= {"k_scale": 1.0, "v_scale": 1.0}
    if k_pre_transposed:
        k_cache = np.ascontiguousarray(k_cache.swapaxes(2, 3))
    q = lowered(padded_rows(rng, heads, 256, n, 64, BF16), -30)
    k = lowered(padded_rows(rng, 1, 256, n, 64, BF16), 80)
    v = padded_rows(rng, 1, 256, n, 64, BF16)
    call = (q, k, v, k_cache, v_cache, table, prior, n)
    out = segmented_attention(*call, kv_segment_size=segment, softmax="exact", **options)
    assert_close(out, reference.segmented_attention(*call, **options))


def test_a_chunk_without_tokens_is_zero_whatever_its_first_key_is() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (garbage(rng, (1, 128, 64), BF16) for _ in range(3))
    k[0, 0] = np.nan
    paged = paged_tokens(rng, [600], 1, 64, 16, BF16, holes=0.5)
    caches = paged.k_cache, paged.v_cache
    out = segmented_attention(q, k, v, *caches, paged.tables[0], 600, 0, softmax="exact")
    np.testing.assert_array_equal(out.astype(float), 0.0)


def test_keys_that_left_the_window_do_not_stand_in_for_absent_ones() -> None:
    """fp32: three sections of 8 key tiles, of which the third is gathered over the first.

    Scores are some 49 nats in the first one, -49 elsewhere.
    """
    rng = np.random.default_rng(3)
    prior, window = 3500, 3000
    paged = paged_tokens(rng, [prior], 1, 64, 16, np.float32)
    table = paged.tables[0].copy()
    k_cache = lowered(paged.k_cache, 13)
    # Rows see the keys from position 501 on, the last row those from 628 on.
    k_cache[table[500 // 16 : 624 // 16], 0, :, 0] = -13
    table[(prior - 1024) // 16 : prior // 16] = -1
    q = lowered(padded_rows(rng, 1, 128, 128, 64, np.float32), -30)
    k = lowered(padded_rows(rng, 1, 128, 128, 64, np.float32), 13)
    v = padded_rows(rng, 1, 128, 128, 64, np.float32)
    call = (q, k, v, k_cache, paged.v_cache, table, prior, 128)
    out = segmented_attention(*call, softmax="exact", sliding_window=window)
    expected = reference.segmented_attention(*call, sliding_window=window)
    assert relative_error(out[:, 127], expected[:, 127]) < 3e-5
    assert_close(out, expected)


@settings(max_examples=8)
@given(
    seed=seeds,
    prior=st.integers(0, 2200) | st.sampled_from([512, 513, 1024, 1025, 1536, 1537, 2048]),
    segment=st.sampled_from([1024, 2048]),
    holes=st.sampled_from([0.0, 0.3]),
)
def test_what_whole_segments_leave_is_taken_in_two_lengths(
    seed: int, prior: int, segment: int, holes: float
) -> None:
    """With more than 16 row tiles: 1024 tokens at once, then 512."""
    rng = np.random.default_rng(seed)
    paged = paged_tokens(rng, [prior], 1, 32, 32, BF16, holes=holes, spare_blocks=70)
    n = int(rng.integers(1, 257))
    q = padded_rows(rng, 9, 256, n, 32, BF16)
    k, v = (padded_rows(rng, 1, 256, n, 32, BF16) for _ in range(2))
    call = (q, k, v, paged.k_cache, paged.v_cache, paged.tables[0], prior, n)
    out = segmented_attention(*call, softmax="exact", kv_segment_size=segment)
    assert_close(out, reference.segmented_attention(*call))


@pytest.mark.parametrize("softmax", ["auto", "exact"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("k_scale", "score"), [(2.0, 100), (4.0, 60), (0.5, -200)])
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
def test_the_cache_scale_is_not_applied_to_the_chunk(
    dtype: Any, k_scale: float, score: float, window: int | None, softmax: str
) -> None:
    """One cached key of score 0 and value 1, one key of the chunk of score `score`, value 1."""
    q, k, v = (np.zeros((1, 128, 32), dtype) for _ in range(3))
    q[0, 0, 0], k[0, 0, 0], v[0, 0] = 1, score, 1
    k_cache, v_cache = np.zeros((2, 1, 16, 32), dtype), np.ones((2, 1, 16, 32), dtype)
    out = segmented_attention(
        q, k, v, k_cache, v_cache, np.array([1], np.int32), 1, 1, scale=1.0, softmax=softmax,
        sliding_window=window, k_scale=k_scale,
    )  # fmt: skip
    np.testing.assert_allclose(out[0, 0].astype(float), 1.0, rtol=1e-2)
