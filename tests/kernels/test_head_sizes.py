"""Head sizes that fill no whole partitions, and the longest chunks of them."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.kernels import paged_decode, segmented_attention
from segattn.kernels.shape_checks import HEAD_DIMS
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import Options, assert_close, normal, padded_rows, paged_tokens

BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_every_head_size_decodes_and_prefills(d: int) -> None:
    """Caches of one byte in every second size, pre-transposed in every second pair."""
    rng = np.random.default_rng(d)
    number = d // 8
    option = Options(
        None, True, FP8 if number % 2 else None, True, 1 + number // 4 % 2, number // 2 % 2 == 1,
        True, None,
    )  # fmt: skip
    paged = paged_tokens(rng, [70, 333], 2, d, 16, option.cache_dtype(BF16), holes=0.1)
    caches = option.stored_keys(paged.k_cache), paged.v_cache
    named = option.arguments(rng, 4) | option.scales(rng, 2, BF16)
    call: list[Any] = [normal(rng, (2, 4, 2, d), BF16), *caches, paged.tables]
    call.append(np.array([70, 333], np.int32))
    assert_close(paged_decode(*call, **named), reference.paged_decode(*call, **named))
    chunk = [padded_rows(rng, heads, 128, 90, d, BF16) for heads in (4, 2, 2)]
    call = [*chunk, *caches, paged.tables[1], 333, 90]
    expected = reference.segmented_attention(*call, **named)
    for softmax in ("bounded", "exact"):
        assert_close(segmented_attention(*call, **named, softmax=softmax), expected)


@pytest.mark.parametrize(("d", "dtype"), [(136, np.float32), (248, BF16)])
def test_the_longest_chunk_of_an_odd_size_fits_the_memory_on_chip(d: int, dtype: Any) -> None:
    rng = np.random.default_rng(d)
    rows = 4096 if dtype is np.float32 else 8192
    paged = paged_tokens(rng, [700], 1, d, 128, dtype)
    q, k, v = (padded_rows(rng, 1, rows, 30, d, dtype) for _ in range(3))
    call = [q, k, v, paged.k_cache, paged.v_cache, paged.tables[0], 700, 30]
    assert_close(segmented_attention(*call), reference.segmented_attention(*call))
    longer = [np.zeros((1, rows + 128, d), dtype) for _ in range(3)]
    with pytest.raises(ValueError, match=f"must be at most {rows}"):
        segmented_attention(*longer, *call[3:])
