"""write_kv_cache against the float64 reference: exactly the named rows, bit for bit."""

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels import write_kv_cache
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    Options,
    assert_same_rows,
    block_sizes,
    garbage,
    head_dims,
    options,
    seeds,
)


@given(
    seed=seeds,
    num_kv_heads=st.integers(1, 5),
    num_tokens=st.integers(1, 300) | st.sampled_from([1, 127, 128, 129, 256]),
    d=head_dims,
    block_size=block_sizes,
    padding=st.just(0.0) | st.floats(0, 1),
    in_order=st.booleans(),
    dtype=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
    options=options,
)
def test_writes_exactly_the_slots(
    seed: int,
    num_kv_heads: int,
    num_tokens: int,
    d: int,
    block_size: int,
    padding: float,
    in_order: bool,
    dtype: npt.DTypeLike,
    options: Options,
) -> None:
    rng = np.random.default_rng(seed)
    skipped = int(rng.integers(0, block_size))
    num_blocks = -(-num_tokens // block_size) + 2
    shape = (num_blocks, num_kv_heads, block_size, d)
    slots = rng.permutation(num_blocks * block_size)[:num_tokens].astype(np.int32)
    if in_order:
        slots = np.arange(skipped, skipped + num_tokens, dtype=np.int32)
    slots[rng.random(num_tokens) < padding] = -1
    k, v = (rng.standard_normal((num_kv_heads, num_tokens, d)) * 20 for _ in range(2))
    k, v = k.astype(dtype), v.astype(dtype)
    unwritten = slots == -1
    k[:, unwritten], v[:, unwritten] = (garbage(rng, k[:, unwritten].shape, dtype) for _ in "kv")
    caches = [garbage(rng, shape, options.cache_dtype(dtype)) for _ in range(2)]
    caches[0] = options.stored_keys(caches[0])
    expected = [cache.copy() for cache in caches]
    scales = options.scales(rng, num_kv_heads, dtype)
    reference.write_kv_cache(k, v, expected[0], expected[1], slots, **scales)
    returned = write_kv_cache(k, v, caches[0], caches[1], slots, **scales)
    for cache, result, wanted in zip(caches, returned, expected, strict=True):
        assert result is cache
        assert_same_rows(cache, wanted)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_nan_and_infinity_are_stored_as_they_are(dtype: npt.DTypeLike) -> None:
    k = garbage(np.random.default_rng(0), (2, 5, 64), dtype)
    k_cache, v_cache = np.zeros((1, 2, 16, 64), dtype), np.zeros((1, 2, 16, 64), dtype)
    write_kv_cache(k, k, k_cache, v_cache, np.arange(5, dtype=np.int32))
    assert k_cache[0, :, :5].tobytes() == k.tobytes()
    assert v_cache[0, :, :5].tobytes() == k.tobytes()


def test_a_cache_with_more_rows_than_fp32_counts_exactly() -> None:
    # 2**24 + 2**10 rows: a row number that went through fp32 would be off by one.
    block_size, d, num_kv_heads = 16, 32, 3
    num_blocks = (2**24 + 2**10) // (block_size * num_kv_heads)
    shape = (num_blocks, num_kv_heads, block_size, d)
    k_cache, v_cache = np.zeros(shape, np.float16), np.zeros(shape, np.float16)
    k = np.arange(1, 2 * 3 * d + 1, dtype=np.float16).reshape(3, 2, d)
    slots = np.array([num_blocks * block_size - 1, num_blocks * block_size - 8], np.int32)
    write_kv_cache(k, k, k_cache, v_cache, slots)
    for cache in (k_cache, v_cache):
        np.testing.assert_array_equal(cache[-1, :, 15], k[:, 0])
        np.testing.assert_array_equal(cache[-1, :, 8], k[:, 1])
        cache[-1, :, [15, 8]] = 0
        assert not cache[-2:].any()
