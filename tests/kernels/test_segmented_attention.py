"""segmented_attention against the float64 reference."""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels import segmented_attention
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    Options,
    assert_close,
    block_sizes,
    dtypes,
    gqa,
    head_dims,
    missing_rows,
    normal,
    options,
    padded_rows,
    paged_tokens,
    seeds,
)


@given(
    seed=seeds,
    heads=gqa,
    tiles=st.integers(1, 2),
    data=st.data(),
    prior=st.integers(0, 700) | st.sampled_from([127, 128, 256, 384, 512]),
    segment=st.sampled_from([128, 256, 384, 512, 2048]),
    d=head_dims,
    block_size=block_sizes,
    options=options,
    holes=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=dtypes,
)
def test_equals_the_reference(
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
    dtype: npt.DTypeLike,
) -> None:
    rng = np.random.default_rng(seed)
    rows = tiles * 128 - data.draw(missing_rows)
    n = data.draw(st.integers(0, rows))
    cache_dtype = options.cache_dtype(dtype)
    paged = paged_tokens(
        rng, [prior], heads[1], d, block_size, cache_dtype, holes=holes,
        unseen=options.unseen(prior),
    )  # fmt: skip
    paged.k_cache = options.stored_keys(paged.k_cache)
    q = padded_rows(rng, heads[0], rows, n, d, dtype)
    k, v = (padded_rows(rng, heads[1], rows, n, d, dtype) for _ in range(2))
    before = paged.k_cache.tobytes(), paged.v_cache.tobytes()
    call = (q, k, v, paged.k_cache, paged.v_cache, paged.tables[0], prior, n)
    arguments = {**options.arguments(rng, heads[0]), **options.scales(rng, heads[1], dtype)}
    expected = reference.segmented_attention(*call, **arguments)
    out = segmented_attention(*call, kv_segment_size=segment, **arguments)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert_close(out[:, :n], expected[:, :n])
    np.testing.assert_array_equal(out[:, n:].astype(float), 0.0)
    assert (paged.k_cache.tobytes(), paged.v_cache.tobytes()) == before


@pytest.mark.parametrize("window", [None, 1500])
def test_a_prior_of_131072_tokens(window: int | None) -> None:
    rng = np.random.default_rng(7)
    prior, block_size = 131072, 128
    paged = paged_tokens(rng, [prior], 1, 32, block_size, np.float32, spare_blocks=1)
    q, k, v = (padded_rows(rng, 1, 128, 2, 32, np.float32) for _ in range(3))
    call = (q, k, v, paged.k_cache, paged.v_cache, paged.tables[0], prior, 2)
    out = segmented_attention(*call, sliding_window=window)
    assert_close(out, reference.segmented_attention(*call, sliding_window=window))


@pytest.mark.parametrize(
    ("heads", "dtype", "lnc"),
    [(1, ml_dtypes.bfloat16, 1), (2, np.float32, 1), (1, np.float32, 2)],
)
def test_a_chunk_of_8192_rows_fits_the_memory_on_chip(
    heads: int, dtype: npt.DTypeLike, lnc: int
) -> None:
    rng = np.random.default_rng(3)
    prior, n, d = 2100, 30, 128
    paged = paged_tokens(rng, [prior], 1, d, 128, dtype)
    q = padded_rows(rng, heads, 8192, n, d, dtype)
    k, v = (padded_rows(rng, 1, 8192, n, d, dtype) for _ in range(2))
    call = (q, k, v, paged.k_cache, paged.v_cache, paged.tables[0], prior, n)
    assert_close(segmented_attention(*call, lnc=lnc), reference.segmented_attention(*call))


def test_slots_beyond_the_integers_of_fp32_are_found_in_a_window() -> None:
    rng = np.random.default_rng(6)
    prior, num_blocks, fp8 = 200, 2**17 + 3, ml_dtypes.float8_e4m3fn
    # 2**24 + 384 slots of 32 bytes: zeros that nobody touches take no memory.
    caches = [np.zeros((num_blocks, 1, 128, 32), fp8) for _ in range(2)]
    table = np.array([num_blocks - 1, num_blocks - 2], np.int32)
    for cache in caches:
        cache[table] = normal(rng, (2, 1, 128, 32), fp8)
    q, k, v = (normal(rng, (1, 128, 32), ml_dtypes.bfloat16) for _ in range(3))
    call: tuple[Any, ...] = (q, k, v, *caches, table, prior, 100)
    arguments: dict[str, Any] = {"sliding_window": 90, "k_scale": 0.5, "v_scale": 0.3}
    out = segmented_attention(*call, **arguments)
    assert_close(out[:, :100], reference.segmented_attention(*call, **arguments)[:, :100])
