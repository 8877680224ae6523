"""padded_prefill against the float64 reference."""

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from segattn.kernels import padded_prefill
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    Array,
    Options,
    assert_close,
    assert_same_rows,
    block_sizes,
    dtypes,
    garbage,
    gqa,
    head_dims,
    missing_rows,
    options,
    padded_rows,
    seeds,
)


def chunk(
    rng: np.random.Generator,
    heads: tuple[int, int],
    rows: int,
    n: int,
    d: int,
    block_size: int,
    dtype: npt.DTypeLike,
    cache_dtype: npt.DTypeLike,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """q, k, v, caches of garbage and shuffled slots of a chunk with n real rows."""
    q = padded_rows(rng, heads[0], rows, n, d, dtype)
    k, v = (padded_rows(rng, heads[1], rows, n, d, dtype) for _ in range(2))
    shape = (-(-n // block_size) + 2, heads[1], block_size, d)
    slots = np.full(rows, -1, np.int32)
    slots[:n] = rng.permutation(shape[0] * block_size)[:n]
    k_cache, v_cache = (garbage(rng, shape, cache_dtype) for _ in range(2))
    return q, k, v, k_cache, v_cache, slots


def check(
    q: Array,
    k: Array,
    v: Array,
    caches: tuple[Array, Array],
    slots: Array,
    n: int,
    **arguments: Any,
) -> None:
    """The kernel's output, zero rows and caches are the reference's."""
    expected_caches = caches[0].copy(), caches[1].copy()
    expected, _, _ = reference.padded_prefill(q, k, v, *expected_caches, slots, n, **arguments)
    out, *returned = padded_prefill(q, k, v, *caches, slots, n, **arguments)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert_close(out[:, :n], expected[:, :n])
    np.testing.assert_array_equal(out[:, n:].astype(float), 0.0)
    for cache, result, wanted in zip(caches, returned, expected_caches, strict=True):
        assert result is cache
        assert_same_rows(cache, wanted)


@given(
    seed=seeds,
    heads=gqa,
    tiles=st.integers(1, 5),
    data=st.data(),
    in_order=st.booleans(),
    d=head_dims,
    block_size=block_sizes,
    dtype=dtypes,
    options=options,
)
def test_equals_the_reference(
    seed: int,
    heads: tuple[int, int],
    tiles: int,
    data: st.DataObject,
    in_order: bool,
    d: int,
    block_size: int,
    dtype: npt.DTypeLike,
    options: Options,
) -> None:
    rng = np.random.default_rng(seed)
    rows = tiles * 128 - data.draw(missing_rows)
    n = data.draw(st.integers(0, rows))
    cache_dtype = options.cache_dtype(dtype)
    q, k, v, k_cache, v_cache, slots = chunk(rng, heads, rows, n, d, block_size, dtype, cache_dtype)
    if in_order:
        slots[:n] = np.arange(n) + int(rng.integers(0, block_size))
    check(
        q, k, v, (options.stored_keys(k_cache), v_cache), slots, n,
        **options.arguments(rng, heads[0]), **options.scales(rng, heads[1], dtype),
    )  # fmt: skip


@settings(max_examples=3)
@given(seed=seeds, n=st.integers(2049, 2304), window=st.sampled_from([None, 100, 2100]))
def test_rows_beyond_one_softmax_step_continue_it(seed: int, n: int, window: int | None) -> None:
    rng = np.random.default_rng(seed)
    q, k, v, k_cache, v_cache, slots = chunk(rng, (1, 1), 2304, n, 64, 128, np.float32, np.float32)
    check(q, k, v, (k_cache, v_cache), slots, n, sliding_window=window)
