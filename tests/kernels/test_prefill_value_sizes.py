"""Prefill and cache writes with values of another size than keys."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segattn import kernels
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    Options,
    assert_close,
    assert_same_rows,
    block_sizes,
    dtypes,
    garbage,
    normal,
    options,
    padded_rows,
    paged_tokens,
    seeds,
)

BF16 = ml_dtypes.bfloat16
sizes = st.sampled_from([(192, 128), (192, 256), (64, 128), (96, 32), (40, 104)])


@settings(max_examples=30)
@given(
    seed=seeds, dtype=dtypes, size=sizes, heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    rows=st.sampled_from([128, 200, 512]), prior=st.integers(0, 700), block_size=block_sizes,
    option=options, softmax=st.sampled_from(["auto", "exact"]), causal=st.booleans(),
    data=st.data(),
)  # fmt: skip
def test_a_chunk_is_attended_and_written(
    seed: int, dtype: Any, size: tuple[int, int], heads: tuple[int, int], rows: int, prior: int,
    block_size: int, option: Options, softmax: str, causal: bool, data: st.DataObject,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    (d, dv), cache_dtype = size, option.cache_dtype(dtype)
    option.window = option.window if causal else None
    n = data.draw(st.integers(0, rows))
    unseen = option.unseen(prior)
    paged = paged_tokens(rng, [prior], heads[1], d, block_size, cache_dtype, unseen=unseen)
    values = normal(rng, (*paged.k_cache.shape[:3], dv), cache_dtype)
    keys = option.stored_keys(paged.k_cache)
    q = padded_rows(rng, heads[0], rows, n, d, dtype)
    k, v = (padded_rows(rng, heads[1], rows, n, width, dtype) for width in size)
    named = option.arguments(rng, heads[0]) | option.scales(rng, heads[1], dtype)
    named |= {"causal": causal}
    call: list[Any] = [q, k, v, keys, values, paged.tables[0], prior, n]
    out = kernels.segmented_attention(*call, **named, softmax=softmax)
    assert out.shape == (heads[0], rows, dv)
    assert_close(out, reference.segmented_attention(*call, **named))

    if not causal:
        call[1:3] = None, None
        out = kernels.segmented_attention(*call, **named)
        assert_close(out, reference.segmented_attention(*call, **named))

    blocks = -(-rows // block_size) + 1
    caches = [garbage(rng, (blocks, heads[1], block_size, width), cache_dtype) for width in size]
    caches[0] = option.stored_keys(caches[0])
    wanted = [cache.copy() for cache in caches]
    slots = np.full(rows, -1, np.int32)
    slots[:n] = rng.permutation(blocks * block_size)[:n]
    call = [q, k, v, *caches, slots, n]
    out, *_ = kernels.padded_prefill(*call, **named, softmax=softmax)
    call = [q, k, v, *wanted, slots, n]
    expected, *_ = reference.padded_prefill(*call, **named)
    assert_close(out, expected)
    for cache, own in zip(caches, wanted, strict=True):
        assert_same_rows(cache, own)
    slots = np.roll(slots, 7)
    scales = {name: each for name, each in named.items() if name in option.scales(rng, 1, dtype)}
    k, v = (normal(rng, (heads[1], rows, width), dtype) for width in size)
    call = [k, v, caches[0], caches[1], slots]
    kernels.write_kv_cache(*call, **scales)
    reference.write_kv_cache(k, v, wanted[0], wanted[1], slots, **scales)
    for cache, own in zip(caches, wanted, strict=True):
        assert_same_rows(cache, own)


@pytest.mark.parametrize(("dtype", "softmax"), [(BF16, "bounded"), (np.float32, "exact")])
def test_a_long_chunk_with_wider_values_fits_the_memory_on_chip(dtype: Any, softmax: str) -> None:
    rng = np.random.default_rng(3)
    paged = paged_tokens(rng, [300], 1, 64, 128, dtype)
    values = normal(rng, (*paged.k_cache.shape[:3], 128), dtype)
    q, k, v = (padded_rows(rng, 1, 8192, 30, width, dtype) for width in (64, 64, 128))
    call: list[Any] = [q, k, v, paged.k_cache, values, paged.tables[0], 300, 30]
    out = kernels.segmented_attention(*call, softmax=softmax)
    assert_close(out, reference.segmented_attention(*call))


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (136, "v: head size 136 must be at most 128 for keys of 64"),
        (36, "v: head size=36: must be a multiple of 8 within 32..256"),
    ],
)
def test_other_values_are_refused(width: int, message: str) -> None:
    cache, own = np.ones((3, 1, 16, 64), BF16), np.ones((1, 128, 64), BF16)
    wide = np.ones((3, 1, 16, width), BF16)
    v = np.ones((1, 128, width), BF16)
    with pytest.raises(ValueError, match=message):
        kernels.write_kv_cache(own, v, cache, wide, np.arange(128, dtype=np.int32) - 128)
    with pytest.raises(ValueError, match=message):
        kernels.segmented_attention(own, own, v, cache, wide, np.array([1], np.int32), 5, 3)
    call: list[Any] = [own, None, None, cache, wide, np.array([1], np.int32), 5, 3]
    with pytest.raises(ValueError, match=message.replace("v:", "v_cache:")):
        kernels.segmented_attention(*call, causal=False)
