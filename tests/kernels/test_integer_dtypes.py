"""Tables, slots and lengths may be uint32 or int64, as frameworks make them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels import (
    padded_prefill,
    paged_decode,
    segmented_attention,
    write_kv_cache,
)
from segattn.tests.kernels.cases import normal, paged_tokens, seeds

D, BLOCK = 32, 16
others = st.sampled_from([np.int64, np.uint32])


@given(seeds, st.integers(1, 128), others)
def test_a_write_and_a_prefill_give_the_same(seed: int, count: int, dtype: Any) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = (normal(rng, (1, 128, D), np.float32) for _ in range(3))
    slots = rng.permutation(9 * BLOCK)[:128].astype(np.int32)
    if dtype == np.uint32:
        count = 128  # it has no -1 for padding
    padded = slots.copy()
    padded[count:] = -1
    for given_slots, prefill in ((slots, False), (padded, True)):
        results = []
        for own in (given_slots, given_slots.astype(dtype)):
            k_cache, v_cache = np.full((2, 9, 1, BLOCK, D), 7.0, np.float32)
            if prefill:
                out, *written = padded_prefill(q, k, v, k_cache, v_cache, own, count)
                results.append([out, *written])
            else:
                write_kv_cache(k, v, k_cache, v_cache, own)
                results.append([k_cache, v_cache])
        for first, second in zip(*results, strict=True):
            np.testing.assert_array_equal(first, second)


@given(seeds, st.integers(1, 60), others)
def test_attention_over_a_cache_gives_the_same(seed: int, prior: int, dtype: Any) -> None:
    rng = np.random.default_rng(seed)
    paged = paged_tokens(rng, [prior], 1, D, BLOCK, np.float32)
    caches = paged.k_cache, paged.v_cache
    table = paged.tables[0][: -(-prior // BLOCK)]
    q, k, v = (normal(rng, (1, 128, D), np.float32) for _ in range(3))
    np.testing.assert_array_equal(
        segmented_attention(q, k, v, *caches, table, prior, 100),
        segmented_attention(q, k, v, *caches, table.astype(dtype), prior, 100),
    )
    lengths, counts = np.array([prior], np.int32), np.array([1], np.int32)
    one = normal(rng, (1, 1, 1, D), np.float32)
    np.testing.assert_array_equal(
        paged_decode(one, *caches, table[None], lengths, query_lens=counts),
        paged_decode(
            one, *caches, table[None].astype(dtype), lengths.astype(dtype),
            query_lens=counts.astype(dtype),
        ),
    )  # fmt: skip


def test_padding_of_an_unsigned_table_is_refused() -> None:
    cache = np.zeros((4, 1, BLOCK, D), np.float32)
    q = np.zeros((1, 128, D), np.float32)
    table = np.array([0, 2**32 - 1], np.uint32)
    with pytest.raises(ValueError, match=r"block_table\[1\]=4294967295: must be within int32"):
        segmented_attention(q, q, q, cache, cache, table, 3, 5)
