"""paged_decode at the edges of its numerics: error of an exact softmax, extremes, block edges."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels import paged_decode
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    TOLERANCE,
    Array,
    block_sizes,
    garbage,
    gqa,
    head_dims,
    normal,
    paged_tokens,
    relative_error,
    seeds,
)

BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def rounded_decode(
    call: tuple[Array, Array, Array, Array, Array],
    query_lens: Array,
    window: int | None,
    sinks: Array | None,
    scales: tuple[float, float],
) -> Array:
    """Exact-maximum softmax with bf16 probabilities and a bf16 result, all else in float64."""
    q, k_cache, v_cache, tables, lengths = call
    num_requests, heads, _, d = q.shape
    group, block_size = heads // k_cache.shape[1], k_cache.shape[2]
    out = np.zeros(q.shape)
    for request in range(num_requests):
        for t in range(query_lens[request] if lengths[request] else 0):
            last = lengths[request] - query_lens[request] + t
            seen = np.arange(0 if window is None else max(0, last - window + 1), last + 1)
            seen = seen[tables[request, seen // block_size] >= 0]
            blocks, places = tables[request, seen // block_size], seen % block_size
            for head in range(heads):
                keys = k_cache[blocks, head // group, places].astype(float) * scales[0]
                values = v_cache[blocks, head // group, places].astype(float) * scales[1]
                scores = keys @ q[request, head, t].astype(float) / np.sqrt(d)
                sink = -np.inf if sinks is None else float(sinks[head])
                largest = max([sink, *scores])
                if largest == -np.inf:
                    continue
                weights = np.exp(scores - largest).astype(BF16).astype(float)
                total = weights.sum() + np.exp(sink - largest)
                out[request, head, t] = weights @ values / total
    return out.astype(BF16)


@given(
    seed=seeds,
    heads=gqa | st.just((8, 1)),
    lengths=st.lists(st.integers(0, 2600), min_size=1, max_size=3),
    num_queries=st.sampled_from([1, 1, 2, 4]),
    data=st.data(),
    d=head_dims,
    block_size=block_sizes,
    window=st.none() | st.integers(1, 3000) | st.sampled_from([16, 17, 128, 129]),
    with_sinks=st.booleans(),
    fp8=st.booleans(),
    k_pre_transposed=st.booleans(),
    holes=st.sampled_from([0.0, 0.3]),
    lnc=st.sampled_from([1, 2]),
)
def test_the_error_is_that_of_an_exact_softmax_with_bf16_probabilities(
    seed: int,
    heads: tuple[int, int],
    lengths: list[int],
    num_queries: int,
    data: st.DataObject,
    d: int,
    block_size: int,
    window: int | None,
    with_sinks: bool,
    fp8: bool,
    k_pre_transposed: bool,
    holes: float,
    lnc: int,
) -> None:
    """At most 1.15 times it, relative L2 against float64; of a few rows, rounded by luck, 1.5."""
    rng = np.random.default_rng(seed)
    paged = paged_tokens(rng, lengths, heads[1], d, block_size, FP8 if fp8 else BF16, holes=holes)
    real = np.array([data.draw(st.integers(0, min(num_queries, n))) for n in lengths], np.int32)
    q = garbage(rng, (len(lengths), heads[0], num_queries, d), BF16)
    for request, queries in enumerate(real):
        q[request, :, :queries] = normal(rng, (heads[0], queries, d), BF16)
    call = (q, paged.k_cache, paged.v_cache, paged.tables, np.array(lengths, np.int32))
    sinks = rng.uniform(-6, 6, heads[0]).astype(np.float32) if with_sinks else None
    options: dict[str, Any] = {"query_lens": real, "sliding_window": window, "sinks": sinks}
    scales = (0.25, 0.1) if fp8 else (1.0, 1.0)
    if fp8:
        options.update(k_scale=scales[0], v_scale=scales[1])
    expected = reference.paged_decode(*call, **options)
    keys = np.ascontiguousarray(call[1].swapaxes(2, 3)) if k_pre_transposed else call[1]
    out = paged_decode(q, keys, *call[2:], k_pre_transposed=k_pre_transposed, lnc=lnc, **options)
    allowed = relative_error(rounded_decode(call, real, window, sinks, scales), expected)
    most = 1.15 if heads[0] * real.sum() >= 16 else 1.5
    assert relative_error(out, expected) <= most * allowed


FINITE_FP8 = np.array([b for b in range(256) if b & 0x7F < 0x78], np.uint8).view(FP8)
"""Every float8_e4m3fn up to 240 in size: those that trn2 reads alike, denormals included."""


@given(
    seed=seeds,
    heads=gqa,
    length=st.integers(1, 600),
    num_queries=st.sampled_from([1, 3]),
    d=head_dims,
    block_size=block_sizes,
    k_scale=st.sampled_from([1e-6, 0.01, 1.0, 1e6]),
    v_scale=st.sampled_from([1e-6, 1.0, 1e6]),
    dtype=st.sampled_from([BF16, np.float16]),
    k_pre_transposed=st.booleans(),
)
def test_every_fp8_value_is_read_as_it_is(
    seed: int,
    heads: tuple[int, int],
    length: int,
    num_queries: int,
    d: int,
    block_size: int,
    k_scale: float,
    v_scale: float,
    dtype: Any,
    k_pre_transposed: bool,
) -> None:
    """Pairs of keys pass PE as 16-bit elements: no pattern of bits may matter there."""
    rng = np.random.default_rng(seed)
    if dtype == np.float16:
        v_scale = 1.0  # the result must lie in the range of normal fp16 numbers
    paged = paged_tokens(rng, [length], heads[1], d, block_size, FP8)
    for cache in (paged.k_cache, paged.v_cache):
        drawn = rng.choice(FINITE_FP8, cache.shape)
        finite = np.isfinite(cache.astype(float))
        cache[finite] = drawn[finite]
    q = normal(rng, (1, heads[0], num_queries, d), dtype)
    scale = 0.02 / k_scale  # scores of some 20: one key does not win alone
    call = (q, paged.k_cache, paged.v_cache, paged.tables, np.array([length], np.int32))
    options: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "scale": scale / d**0.5}
    options["query_lens"] = np.array([min(num_queries, length)], np.int32)
    expected = reference.paged_decode(*call, **options)
    keys = np.ascontiguousarray(call[1].swapaxes(2, 3)) if k_pre_transposed else call[1]
    out = paged_decode(q, keys, *call[2:], k_pre_transposed=k_pre_transposed, **options)
    assert relative_error(out, expected) <= TOLERANCE[q.dtype]


@given(
    seed=seeds,
    block_size=block_sizes,
    blocks=st.integers(1, 5),
    beyond=st.integers(-2, 2),
    reach=st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]),
    num_queries=st.integers(1, 4),
    data=st.data(),
    fp8=st.booleans(),
)
def test_windows_and_queries_at_the_edges_of_blocks(
    seed: int,
    block_size: int,
    blocks: int,
    beyond: int,
    reach: int,
    num_queries: int,
    data: st.DataObject,
    fp8: bool,
) -> None:
    """Contexts that end at a block's edge or next to it, requests without context or queries."""
    rng = np.random.default_rng(seed)
    lengths = [max(0, blocks * block_size + beyond), 0, block_size]
    real = np.array([data.draw(st.integers(0, min(num_queries, n))) for n in lengths], np.int32)
    paged = paged_tokens(rng, lengths, 1, 64, block_size, FP8 if fp8 else BF16)
    q = garbage(rng, (3, 2, num_queries, 64), BF16)
    for request, queries in enumerate(real):
        q[request, :, :queries] = normal(rng, (2, queries, 64), BF16)
    call = (q, paged.k_cache, paged.v_cache, paged.tables, np.array(lengths, np.int32))
    options: dict[str, Any] = {"query_lens": real, "sliding_window": reach}
    if fp8:
        options.update(k_scale=0.3, v_scale=2.0)
    expected = reference.paged_decode(*call, **options)
    out = paged_decode(*call, **options)
    assert relative_error(out, expected) <= TOLERANCE[q.dtype]
    for request, queries in enumerate(real):
        assert (out[request, :, queries:] == 0).all()


@pytest.mark.parametrize("fp8", [False, True])
def test_sinks_from_minus_infinity_to_1e30(fp8: bool) -> None:
    """A head of its own for each; requests with keys, with holes only, and without context."""
    rng = np.random.default_rng(3)
    sinks = np.array([-np.inf, -1e30, -100.0, 0.0, 3.0, 80.0, 1e4, 1e30], np.float32)
    paged = paged_tokens(rng, [200, 40, 0], 2, 64, 16, FP8 if fp8 else BF16)
    paged.tables[1] = -1
    q = normal(rng, (3, 8, 1, 64), BF16)
    call = (q, paged.k_cache, paged.v_cache, paged.tables, np.array([200, 40, 0], np.int32))
    options: dict[str, Any] = {"sinks": sinks}
    if fp8:
        options.update(k_scale=np.array([1.0, 0.1], np.float32), v_scale=1.0)
    expected = reference.paged_decode(*call, **options)
    out = paged_decode(*call, **options)
    for head in range(8):
        error = relative_error(out[:, head], expected[:, head])
        assert error <= TOLERANCE[q.dtype], f"sink {sinks[head]}: {error:.1e}"
    assert (out[0, 6:] == 0).all(), "a sink far above all scores takes all of the weight"
    assert (out[1:] == 0).all()
