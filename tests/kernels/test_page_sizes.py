"""Blocks of 1 to 256 tokens: every function, both layouts of K, one core and two, fp8."""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels import paged_decode, segmented_attention, write_kv_cache
from segattn.reference import attention as reference
from segattn.reference import nki
from segattn.tests.kernels.cases import (
    Array,
    assert_close,
    assert_same_rows,
    dtypes,
    normal,
    padded_rows,
    paged_tokens,
    seeds,
)

LENGTHS = [290, 77]
calls = given(
    seed=seeds,
    block_size=st.sampled_from([1, 2, 4, 8, 256]),
    dtype=dtypes,
    fp8=st.booleans(),
    k_pre_transposed=st.booleans(),
    lnc=st.sampled_from([1, 2]),
    window=st.sampled_from([None, 100, 250]),
)


def layout_of(
    dtype: npt.DTypeLike, fp8: bool, k_pre_transposed: bool
) -> tuple[npt.DTypeLike, dict[str, Any]]:
    """The caches' dtype and the options that go with it."""
    if not fp8 or np.dtype(dtype).itemsize == 4:
        return dtype, {"k_pre_transposed": k_pre_transposed}
    scales = {"k_scale": 0.25, "v_scale": np.array([0.1, 0.3], np.float32)}
    return ml_dtypes.float8_e4m3, {"k_pre_transposed": k_pre_transposed, **scales}


def stored(k_cache: Array, k_pre_transposed: bool) -> Array:
    return np.ascontiguousarray(k_cache.swapaxes(2, 3)) if k_pre_transposed else k_cache


@calls
def test_decode(
    seed: int, block_size: int, dtype: npt.DTypeLike, fp8: bool, k_pre_transposed: bool, lnc: int,
    window: int | None,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    cache_dtype, layout = layout_of(dtype, fp8, k_pre_transposed)
    paged = paged_tokens(rng, LENGTHS, 2, 64, block_size, cache_dtype, holes=0.1)
    keys = stored(paged.k_cache, k_pre_transposed)
    q = normal(rng, (2, 4, 2, 64), dtype)
    call = (q, keys, paged.v_cache, paged.tables, np.array(LENGTHS, np.int32))
    expected = reference.paged_decode(*call, sliding_window=window, **layout)
    with nki.strict(field="error"):
        out = paged_decode(*call, sliding_window=window, lnc=lnc, **layout)
    assert_close(out, expected)


@calls
def test_segmented(
    seed: int, block_size: int, dtype: npt.DTypeLike, fp8: bool, k_pre_transposed: bool, lnc: int,
    window: int | None,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    cache_dtype, layout = layout_of(dtype, fp8, k_pre_transposed)
    paged = paged_tokens(rng, LENGTHS[:1], 2, 64, block_size, cache_dtype, holes=0.1)
    keys = stored(paged.k_cache, k_pre_transposed)
    q, k, v = (padded_rows(rng, heads, 128, 90, 64, dtype) for heads in (4, 2, 2))
    call = (q, k, v, keys, paged.v_cache, paged.tables[0], LENGTHS[0], 90)
    given = {"sliding_window": window, "lnc": lnc, "kv_segment_size": 256, **layout}
    expected = reference.segmented_attention(*call, **given)
    with nki.strict(field="error"):
        out = segmented_attention(*call, **given)
    assert_close(out, expected)


@given(
    seed=seeds,
    block_size=st.sampled_from([1, 2, 4, 8, 256]),
    dtype=dtypes,
    fp8=st.booleans(),
    k_pre_transposed=st.booleans(),
    in_order=st.booleans(),
)
def test_write(
    seed: int, block_size: int, dtype: npt.DTypeLike, fp8: bool, k_pre_transposed: bool,
    in_order: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    cache_dtype, layout = layout_of(dtype, fp8, k_pre_transposed)
    paged = paged_tokens(rng, LENGTHS, 2, 64, block_size, cache_dtype)
    slots = np.full(40, -1, np.int32)
    anywhere = rng.permutation(len(paged.v_cache) * block_size)[:35]
    slots[:35] = np.arange(3, 38) if in_order else anywhere
    k, v = (padded_rows(rng, 2, 40, 35, 64, dtype) for _ in range(2))
    keys = stored(paged.k_cache, k_pre_transposed)
    own, expected = ([keys.copy(), paged.v_cache.copy()] for _ in range(2))
    reference.write_kv_cache(k, v, expected[0], expected[1], slots, **layout)
    with nki.strict(field="error"):
        write_kv_cache(k, v, own[0], own[1], slots, **layout)
    for cache, right in zip(own, expected, strict=True):
        assert_same_rows(cache, right)
