"""deterministic="batch": a request's bits depend on nothing but the request."""

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
    block_sizes,
    gqa,
    options,
    padded_rows,
    paged_tokens,
    seeds,
)

BF16 = ml_dtypes.bfloat16
WIDTH = 20


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Any], dict[str, Any], Any]:
    """A call of paged_decode: contexts that fill several work tiles, or less than one."""
    option: Options = draw(options)
    dtype = draw(st.sampled_from([np.float32, BF16]))
    (num_heads, num_kv_heads), block_size = draw(gqa), draw(block_sizes)
    rng = np.random.default_rng(draw(seeds))
    batch, queries, d = draw(st.integers(2, 6)), draw(st.integers(1, 2)), 64
    cached = rng.standard_normal((2, batch * WIDTH, num_kv_heads, block_size, d)) * 2
    k_cache, v_cache = (each.astype(option.cache_dtype(dtype)) for each in cached)
    tables = rng.permutation(batch * WIDTH).reshape(batch, WIDTH).astype(np.int32)
    tables[rng.random(tables.shape) < 0.05] = -1
    lengths = rng.integers(0, WIDTH * block_size + 1, batch).astype(np.int32)
    lengths[0] = rng.integers(0, 20)
    counts = np.minimum(lengths, rng.integers(0, queries + 1, batch)).astype(np.int32)
    q = rng.standard_normal((batch, num_heads, queries, d)).astype(dtype)
    named = option.arguments(rng, num_heads) | option.scales(rng, num_kv_heads, dtype)
    call = [q, option.stored_keys(k_cache), v_cache, tables, lengths]
    return call, {"query_lens": counts, **named}, rng


def attend(
    call: list[Any], named: dict[str, Any], which: Any, width: int, lnc: int
) -> tuple[Any, Any]:
    """Some of the requests, in this order, with tables of some width."""
    q, k_cache, v_cache, tables, lengths = call
    chosen = np.full((len(which), width), -1, np.int32)
    chosen[:, : tables.shape[1]] = tables[which]
    given = {**named, "query_lens": named["query_lens"][which], "lnc": lnc}
    arrays = (q[which], k_cache, v_cache, chosen, lengths[which])
    out: Any = kernels.paged_decode(*arrays, **given, return_lse=True, deterministic="batch")
    return out[0], out[1]


@settings(max_examples=12, deadline=None)
@given(drawn=batches(), width=st.integers(WIDTH, 4 * WIDTH))
def test_neither_batch_nor_place_nor_table_nor_cores_change_a_bit(
    drawn: tuple[list[Any], dict[str, Any], Any], width: int
) -> None:
    call, named, rng = drawn
    every = np.arange(len(call[0]))
    out, lse = attend(call, named, every, WIDTH, 1)
    expected = reference.paged_decode(*call, **named)
    error = np.linalg.norm(out.astype(np.float64) - expected)
    assert error <= 1.2e-2 * np.linalg.norm(expected)
    order = rng.permutation(every)
    for which, lnc in ((order, 2), (every[:1], 1), (every[1:2], 2)):
        found, found_lse = attend(call, named, which, width, lnc)
        np.testing.assert_array_equal(found, out[which])
        np.testing.assert_array_equal(found_lse, lse[which])


def test_a_single_query_column_has_the_bits_of_many() -> None:
    """One query of one head: PE's moving operand has one column alone, four in a batch of four."""
    rng = np.random.default_rng(0)
    k_cache, v_cache = (rng.standard_normal((2, 80, 1, 16, 64)) * 2).astype(np.float32)
    q = rng.standard_normal((4, 1, 1, 64)).astype(np.float32)
    tables = rng.permutation(80).reshape(4, 20).astype(np.int32)
    lengths = np.array([16, 31, 41, 67], np.int32)
    for k_pre_transposed in (False, True):
        keys = np.ascontiguousarray(k_cache.swapaxes(2, 3)) if k_pre_transposed else k_cache

        def attend(which: Any, keys: Any = keys, turned: bool = k_pre_transposed) -> Any:
            return kernels.paged_decode(
                q[which], keys, v_cache, tables[which], lengths[which],
                k_pre_transposed=turned, deterministic="batch",
            )  # fmt: skip

        together = attend(np.arange(4))
        for request in range(4):
            alone = attend(np.array([request]))
            np.testing.assert_array_equal(alone[0], together[request])


def test_without_it_the_batch_does_change_bits() -> None:
    rng = np.random.default_rng(0)
    k_cache, v_cache = rng.standard_normal((2, 64, 1, 16, 64)).astype(np.float32)
    q = rng.standard_normal((2, 4, 1, 64)).astype(np.float32)
    tables = rng.permutation(64).reshape(2, 32).astype(np.int32)
    lengths = np.array([500, 300], np.int32)
    together = kernels.paged_decode(q, k_cache, v_cache, tables, lengths)
    alone = kernels.paged_decode(q[1:], k_cache, v_cache, tables[1:, :19], lengths[1:])
    assert (together[1] != alone[0]).any()


def test_it_is_none_or_batch_and_part_of_a_plan() -> None:
    cache, q = np.zeros((4, 1, 16, 64), np.float32), np.zeros((1, 1, 1, 64), np.float32)
    step = (q, cache, cache, np.zeros((1, 2), np.int32), np.array([3], np.int32))
    with pytest.raises(ValueError, match="deterministic='all': must be one of None, batch"):
        kernels.paged_decode(*step, deterministic="all")
    plan = kernels.DecodePlan.build(*step, deterministic="batch")
    assert plan.shape.batch_invariant
    with pytest.raises(ValueError, match="deterministic: given with a plan"):
        kernels.paged_decode(q, cache, cache, plan=plan, deterministic="batch")


@settings(max_examples=12, deadline=None)
@given(
    seed=seeds, heads=gqa, option=options, dtype=st.sampled_from([np.float32, BF16]),
    prior=st.integers(0, 1500), rows=st.sampled_from([100, 256]),
)  # fmt: skip
@example(
    0, (3, 1), Options(None, False, None, False, 1, False, False, None), np.float32, 1500, 2048
)
@example(1, (1, 1), Options(None, True, None, False, 1, False, False, None), BF16, 700, 2048)
def test_neither_table_nor_cores_nor_segments_change_a_bit_of_a_prefill(
    seed: int, heads: tuple[int, int], option: Options, dtype: Any, prior: int, rows: int
) -> None:
    rng = np.random.default_rng(seed)
    paged = paged_tokens(rng, [prior], heads[1], 64, 16, option.cache_dtype(dtype), holes=0.1)
    arrays = [padded_rows(rng, n, rows, rows - 5, 64, dtype) for n in (heads[0], *heads[1:] * 2)]
    named = option.arguments(rng, heads[0]) | option.scales(rng, heads[1], dtype)
    named |= {"return_lse": True, "deterministic": "batch"}

    def attend(width: int, lnc: int, segment: int) -> bytes:
        table = np.full(paged.tables.shape[1] + width, -1, np.int32)
        table[: paged.tables.shape[1]] = paged.tables[0]
        caches = option.stored_keys(paged.k_cache), paged.v_cache
        given: Any = {**named, "lnc": lnc, "kv_segment_size": segment}
        out, lse = kernels.segmented_attention(
            arrays[0], arrays[1], arrays[2], *caches, table, prior, rows - 5, **given
        )
        return bytes(out.tobytes() + lse.tobytes())

    first = attend(0, 1, 2048)
    assert attend(0, 2, 2048) == first
    assert attend(700, 1, 128) == first


def test_without_it_cores_do_change_bits_of_a_prefill() -> None:
    rng = np.random.default_rng(0)
    paged = paged_tokens(rng, [1500], 1, 64, 16, np.float32)
    q, k, v = (padded_rows(rng, 1, 2048, 2000, 64, np.float32) for _ in range(3))
    found = [
        kernels.segmented_attention(
            q, k, v, paged.k_cache, paged.v_cache, paged.tables[0], 1500, 2000,
            softmax="exact", lnc=lnc,
        )
        for lnc in (1, 2)
    ]  # fmt: skip
    assert (found[0] != found[1]).any()


def test_a_prefill_has_no_bounded_softmax_with_it() -> None:
    rng = np.random.default_rng(0)
    paged = paged_tokens(rng, [40], 1, 64, 16, np.float32)
    q, k, v = (padded_rows(rng, 1, 128, 100, 64, np.float32) for _ in range(3))
    call = (q, k, v, paged.k_cache, paged.v_cache, paged.tables[0], 40, 100)
    with pytest.raises(ValueError, match="softmax with deterministic='batch'='bounded': must be"):
        kernels.segmented_attention(*call, deterministic="batch", softmax="bounded")
    with pytest.raises(ValueError, match="deterministic='all': must be one of None, batch"):
        kernels.segmented_attention(*call, deterministic="all")
