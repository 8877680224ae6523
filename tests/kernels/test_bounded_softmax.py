"""The bounded softmax: accurate where its check passes, replaced where it fails."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segattn.kernels import padded_prefill, segmented_attention
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    Array,
    Options,
    assert_close,
    block_sizes,
    garbage,
    gqa,
    head_dims,
    options,
    padded_rows,
    paged_tokens,
    seeds,
)

BF16 = ml_dtypes.bfloat16


def rounded_softmax(call: tuple[Any, ...], window: int | None) -> Array:
    """Exact-maximum softmax with bf16 probabilities and a bf16 result, all else in float64."""
    q, k, v, k_cache, v_cache, table, prior, n = call
    heads, _, d = q.shape
    group = heads // k.shape[0]
    block_size = k_cache.shape[2]
    positions = np.array([p for p in range(prior) if table[p // block_size] >= 0], int)
    blocks, offsets = table[positions // block_size], positions % block_size
    out = np.zeros((heads, n, d))
    for head in range(heads):
        kv = head // group
        keys = np.concatenate([k_cache[blocks, kv, offsets], k[kv, :n]]).astype(float)
        values = np.concatenate([v_cache[blocks, kv, offsets], v[kv, :n]]).astype(float)
        scores = q[head, :n].astype(float) @ keys.T / np.sqrt(d)
        behind = prior + np.arange(n)[:, None] - np.concatenate([positions, prior + np.arange(n)])
        scores[(behind < 0) | (behind >= (window or behind.max() + 1))] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True)).astype(BF16).astype(float)
        out[head] = weights @ values / weights.sum(1, keepdims=True)
    return out.astype(BF16)


@given(
    seed=seeds,
    heads=gqa,
    tiles=st.integers(1, 6),
    data=st.data(),
    prior=st.integers(0, 1300) | st.sampled_from([512, 768, 769, 1024]),
    segment=st.sampled_from([128, 384, 512, 640, 1024]),
    d=head_dims,
    block_size=block_sizes,
    options=options,
    holes=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from([BF16, np.float32]),
)
def test_equals_the_reference_without_raising_the_flag(
    seed: int,
    heads: tuple[int, int],
    tiles: int,
    data: st.DataObject,
    prior: int,
    segment: int,
    d: int,
    block_size: int,
    options: Options,
    holes: float,
    dtype: Any,
) -> None:
    rng = np.random.default_rng(seed)
    rows = tiles * 128
    n = data.draw(st.integers(0, rows))
    cache_dtype = options.cache_dtype(dtype)
    paged = paged_tokens(rng, [prior], heads[1], d, block_size, cache_dtype, holes=holes)
    k_cache = options.stored_keys(paged.k_cache)
    q = padded_rows(rng, heads[0], rows, n, d, dtype)
    k, v = (padded_rows(rng, heads[1], rows, n, d, dtype) for _ in range(2))
    call = (q, k, v, k_cache, paged.v_cache, paged.tables[0], prior, n)
    arguments = {**options.arguments(rng, heads[0]), **options.scales(rng, heads[1], dtype)}
    expected = reference.segmented_attention(*call, **arguments)
    out = segmented_attention(*call, kv_segment_size=segment, softmax="bounded", **arguments)
    assert_close(out[:, :n], expected[:, :n])
    np.testing.assert_array_equal(out[:, n:].astype(float), 0.0)


@pytest.mark.parametrize("softmax", ["auto", "bounded"])
@pytest.mark.parametrize(
    ("rows", "n", "prior", "window", "d"),
    [
        (128, 1, 0, None, 128),
        (128, 3, 0, None, 64),
        (128, 128, 0, None, 128),
        (128, 5, 300, None, 64),
        (128, 2, 700, None, 128),
        (256, 256, 0, None, 64),
        (256, 256, 0, None, 256),
        (384, 300, 100, 64, 128),
        (512, 512, 0, None, 128),
        (128, 128, 900, 500, 128),
    ],
)
def test_error_is_within_1_15_of_an_exact_maximum_with_bf16_weights(
    rows: int, n: int, prior: int, window: int | None, d: int, softmax: str
) -> None:
    """Draws are pooled to some 256 rows of heads: the quotient for single rows is noise."""
    rng = np.random.default_rng(n + d)
    own = rounded = 0.0
    for _ in range(max(1, 256 // (4 * n))):
        paged = paged_tokens(rng, [prior], 1, d, 16, BF16)
        q = padded_rows(rng, 4, rows, n, d, BF16)
        k, v = (padded_rows(rng, 1, rows, n, d, BF16) for _ in range(2))
        call = (q, k, v, paged.k_cache, paged.v_cache, paged.tables[0], prior, n)
        expected = reference.segmented_attention(*call, sliding_window=window)[:, :n]
        out = segmented_attention(*call, sliding_window=window, softmax=softmax)[:, :n]
        own += float(np.square(out.astype(float) - expected).sum())
        rounded += float(np.square(rounded_softmax(call, window).astype(float) - expected).sum())
    assert own <= 1.15**2 * rounded


@settings(max_examples=10)
@given(
    seed=seeds,
    heads=gqa,
    tiles=st.integers(1, 5),
    data=st.data(),
    dtype=st.sampled_from([BF16, np.float32]),
    lnc=st.sampled_from([1, 2]),
)
def test_prefill_equals_the_reference_without_raising_the_flag(
    seed: int, heads: tuple[int, int], tiles: int, data: st.DataObject, dtype: Any, lnc: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = tiles * 128
    n = data.draw(st.integers(0, rows))
    q = padded_rows(rng, heads[0], rows, n, 64, dtype)
    k, v = (padded_rows(rng, heads[1], rows, n, 64, dtype) for _ in range(2))
    shape = (tiles * 8, heads[1], 16, 64)
    caches = garbage(rng, shape, dtype), garbage(rng, shape, dtype)
    slots = np.full(rows, -1, np.int32)
    slots[:n] = rng.permutation(rows)[:n]
    wanted = caches[0].copy(), caches[1].copy()
    expected, _, _ = reference.padded_prefill(q, k, v, *wanted, slots, n)
    out, *_ = padded_prefill(q, k, v, *caches, slots, n, softmax="bounded", lnc=lnc)
    assert_close(out, expected)
    assert [c.tobytes() for c in caches] == [c.tobytes() for c in wanted]


@pytest.mark.parametrize(
    ("heads", "tiles", "n", "prior", "holes", "lnc"),
    [(1, 12, 1500, 2300, 0.3, 1), (1, 12, 1100, 0, 0.0, 1), (3, 16, 2048, 600, 0.0, 2)],
)
def test_long_chunks_whose_last_blocks_come_after_the_prior(
    heads: int, tiles: int, n: int, prior: int, holes: float, lnc: int
) -> None:
    rng = np.random.default_rng(tiles)
    paged = paged_tokens(rng, [prior], 1, 64, 32, BF16, holes=holes)
    q = padded_rows(rng, heads, tiles * 128, n, 64, BF16)
    k, v = (padded_rows(rng, 1, tiles * 128, n, 64, BF16) for _ in range(2))
    sinks = np.linspace(-3, 3, heads, dtype=np.float32)
    call = (q, k, v, paged.k_cache, paged.v_cache, paged.tables[0], prior, n)
    expected = reference.segmented_attention(*call, sinks=sinks)
    out = segmented_attention(*call, sinks=sinks, softmax="bounded", kv_segment_size=1024, lnc=lnc)
    assert_close(out, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": np.float16}, r"\(not float16\)"),
        ({"rows": 8192, "dtype": np.float32}, r"at most 2097152 bytes .*S=8192, head_dim=128"),
    ],
)
def test_bounded_is_refused_where_it_does_not_exist(change: dict[str, Any], message: str) -> None:
    q = np.zeros((1, change.get("rows", 128), 128), change.get("dtype", BF16))
    cache = np.zeros((2, 1, 16, 128), q.dtype)
    with pytest.raises(ValueError, match=message):
        segmented_attention(q, q, q, cache, cache, np.zeros(1, np.int32), 5, 5, softmax="bounded")


def test_a_row_sum_that_makes_its_factor_denormal_raises_the_flag() -> None:
    """Cached scores 60 above the chunk's, v_scale 1e-6: a row sum of 1e35, a factor of 1e-41."""
    rng = np.random.default_rng(0)
    q, k, v = 0.1 * rng.standard_normal((3, 1, 128, 64)).astype(np.float32)
    k_cache, v_cache = 0.1 * rng.standard_normal((2, 16, 1, 16, 64)).astype(np.float32)
    q[..., 0], k[..., 0], k_cache[..., 0] = 8, 0, 60
    arguments = (q, k, 1e-6 * v, k_cache, v_cache, np.arange(16, dtype=np.int32), 256, 128)
    with pytest.raises(FloatingPointError):
        segmented_attention(*arguments, v_scale=1e-6, softmax="bounded")
