"""causal=False, with a chunk's own keys and without (cross attention)."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from segattn import kernels
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    Options,
    assert_close,
    block_sizes,
    dtypes,
    garbage,
    gqa,
    options,
    padded_rows,
    paged_tokens,
    relative_error,
    seeds,
)
from segattn.tests.kernels.test_lse import check_lse, decode_call

BF16 = ml_dtypes.bfloat16
D = 64


def _check(found: Any, expected: Any, num_tokens: int, dtype: Any) -> None:
    """Output and lse [H, S, ...]: the real rows close, the others zero and -inf."""
    out, lse = found
    assert out.dtype == dtype
    assert_close(out[:, :num_tokens], expected[0][:, :num_tokens])
    np.testing.assert_array_equal(out[:, num_tokens:].astype(float), 0.0)
    check_lse(lse, expected[1], dtype)


@settings(max_examples=30)
@given(
    seed=seeds, dtype=dtypes, heads=gqa, tiles=st.integers(1, 5), prior=st.integers(0, 900),
    block_size=block_sizes, holes=st.sampled_from([0.0, 0.3]), option=options,
    softmax=st.sampled_from(["auto", "exact"]), data=st.data(),
)  # fmt: skip
def test_a_chunk_sees_all_of_its_prior_and_itself(
    seed: int, dtype: Any, heads: tuple[int, int], tiles: int, prior: int, block_size: int,
    holes: float, option: Options, softmax: str, data: st.DataObject,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    rows, option.window = tiles * 128, None
    n = data.draw(st.integers(0, rows))
    paged = paged_tokens(
        rng, [prior], heads[1], D, block_size, option.cache_dtype(dtype), holes=holes
    )
    q, k, v = (padded_rows(rng, count, rows, n, D, dtype) for count in (heads[0], *heads[1:] * 2))
    keys = option.stored_keys(paged.k_cache)
    named = option.arguments(rng, heads[0]) | option.scales(rng, heads[1], dtype)
    named |= {"causal": False, "return_lse": True}
    call: list[Any] = [q, k, v, keys, paged.v_cache, paged.tables[0], prior, n]
    found = kernels.segmented_attention(*call, **named, softmax=softmax, kv_segment_size=256)
    _check(found, reference.segmented_attention(*call, **named), n, dtype)

    shape = (rows // 16, heads[1], 16, D)
    caches: list[Any] = [garbage(rng, shape, option.cache_dtype(dtype)) for _ in "kv"]
    caches[0] = option.stored_keys(caches[0])
    slots = np.full(rows, -1, np.int32)
    slots[:n] = rng.permutation(rows)[:n]
    call = [q, k, v, *caches, slots, n]
    out, *_, lse = kernels.padded_prefill(*call, **named, softmax=softmax)
    expected = reference.padded_prefill(*call, **named)
    _check((out, lse), (expected[0], expected[3]), n, dtype)


@settings(max_examples=30)
@given(
    seed=seeds, dtype=dtypes, heads=gqa, tiles=st.integers(1, 3), prior=st.integers(0, 900),
    block_size=block_sizes, holes=st.sampled_from([0.0, 0.3, 1.0]), option=options,
    data=st.data(),
)  # fmt: skip
def test_queries_alone_see_the_whole_prior(
    seed: int, dtype: Any, heads: tuple[int, int], tiles: int, prior: int, block_size: int,
    holes: float, option: Options, data: st.DataObject,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    rows, option.window = tiles * 128, None
    n = data.draw(st.integers(0, rows))
    paged = paged_tokens(
        rng, [prior], heads[1], D, block_size, option.cache_dtype(dtype), holes=holes
    )
    q = padded_rows(rng, heads[0], rows, n, D, dtype)
    named = option.arguments(rng, heads[0]) | option.scales(rng, heads[1], dtype)
    named |= {"causal": False, "return_lse": True}
    keys = option.stored_keys(paged.k_cache)
    call: list[Any] = [q, None, None, keys, paged.v_cache, paged.tables[0], prior, n]
    found = kernels.segmented_attention(*call, **named, kv_segment_size=256)
    _check(found, reference.segmented_attention(*call, **named), n, dtype)


@settings(max_examples=30)
@given(seed=seeds, dtype=dtypes, heads=gqa, block_size=block_sizes, option=options)
@example(1, np.float32, (1, 1), 16, Options(None, True, None, False, 2, False, False, None))
def test_decoded_queries_see_the_whole_context(
    seed: int, dtype: Any, heads: tuple[int, int], block_size: int, option: Options
) -> None:
    rng = np.random.default_rng(seed)
    option.window = None
    call, named = decode_call(rng, dtype, heads, block_size, option)
    # Queries that are no tokens of the context: more of them than it has.
    counts = rng.integers(0, 3, len(call[4])).astype(np.int32)
    named |= {"causal": False, "query_lens": counts, "return_lse": True}
    out, lse = kernels.paged_decode(*call, **named)
    expected, expected_lse = reference.paged_decode(*call, **named)
    check_lse(lse, expected_lse, dtype)
    assert_close(out, expected)


@pytest.mark.parametrize("lnc", [1, 2])
def test_a_prior_in_parts_is_merged_with_the_chunk(lnc: int) -> None:
    """Causal over the chunk; parts of the prior by cross attention."""
    rng = np.random.default_rng(lnc)
    prior, n = 500, 100
    paged = paged_tokens(rng, [prior], 2, D, 16, np.float32)
    q, k, v = (padded_rows(rng, heads, 128, n, D, np.float32) for heads in (4, 2, 2))
    table, caches = paged.tables[0], (paged.k_cache, paged.v_cache)
    sinks = rng.standard_normal(4).astype(np.float32)
    expected = reference.segmented_attention(q, k, v, *caches, table, prior, n, sinks=sinks)
    parts: list[Any] = [
        kernels.segmented_attention(q, k, v, *caches, table, 0, n, return_lse=True, lnc=lnc)
    ]
    for part in range(3):
        own = np.where(np.arange(len(table)) % 3 == part, table, -1).astype(np.int32)
        call: list[Any] = [q, None, None, *caches, own, prior, n]
        parts.append(kernels.segmented_attention(*call, causal=False, return_lse=True, lnc=lnc))
    outs, lses = (np.stack(each) for each in zip(*parts, strict=True))
    out, _ = kernels.merge_attention(outs, lses, sinks=sinks, lnc=lnc)
    assert relative_error(out, expected) < 1e-5


def test_padding_is_no_key_where_all_scores_are_low() -> None:
    """Real scores of -450: a padding key, zero on chip, would have all the weight."""
    rng = np.random.default_rng(0)
    q, k, v = (padded_rows(rng, 1, 256, 130, D, BF16) for _ in range(3))
    q[:, :130, 0], k[:, :130, 0] = 60.0, -60.0
    cache = np.zeros((32, 1, 16, D), BF16)
    call: list[Any] = [q, k, v, cache, cache, np.zeros(32, np.int32), 0, 130]
    expected = reference.segmented_attention(*call, causal=False)
    for softmax in ("auto", "exact"):
        assert_close(kernels.segmented_attention(*call, causal=False, softmax=softmax), expected)
    with pytest.raises(FloatingPointError):
        kernels.segmented_attention(*call, causal=False, softmax="bounded")


@pytest.mark.parametrize(("softmax", "dtype"), [("bounded", BF16), ("exact", np.float32)])
def test_a_chunk_of_8192_rows_fits_the_memory_on_chip(softmax: str, dtype: Any) -> None:
    rng = np.random.default_rng(3)
    n, d = 30, 128
    paged = paged_tokens(rng, [300], 1, d, 128, dtype)
    q, k, v = (padded_rows(rng, 1, 8192, n, d, dtype) for _ in range(3))
    call: list[Any] = [q, k, v, paged.k_cache, paged.v_cache, paged.tables[0], 300, n]
    found = kernels.segmented_attention(*call, causal=False, softmax=softmax)
    assert_close(found, reference.segmented_attention(*call, causal=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 5}, "sliding_window=5: must be None with causal=False"),
        ({"causal": 2}, "causal=2: must be one of True, False"),
        ({"k": None}, "k=None: must be an array, or both k and v None"),
        ({"v": None}, "v=None: must be an array, or both k and v None"),
        ({"k": None, "v": None, "causal": True}, "k=None: cross attention needs causal=False"),
        ({"k": None, "v": None, "softmax": "bounded"}, "softmax without k and v='bounded'"),
        ({"k": None, "v": None, "q": np.ones((3, 128, D), BF16)}, "num_q_heads=3 must be"),
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, Any], message: str) -> None:
    cache, rows = np.ones((3, 2, 16, D), BF16), np.ones((2, 128, D), BF16)
    call: dict[str, Any] = {
        "q": rows, "k": rows, "v": rows, "k_cache": cache, "v_cache": cache,
        "block_table": np.array([1], np.int32), "prior_tokens": 5, "num_tokens": 3,
        "causal": False,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        kernels.segmented_attention(**{**call, **change})
