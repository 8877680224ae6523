"""padded_prefill against the float64 reference."""

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from segattn.kernels import padded_prefill
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    Array,
    assert_close,
    dtypes,
    garbage,
    gqa,
    padded_rows,
    seeds,
)


def chunk(
    seed: int, heads: tuple[int, int], rows: int, n: int, d: int, bs: int, dtype: npt.DTypeLike
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """q, k, v, caches of garbage and shuffled slots of a chunk with n real rows."""
    rng = np.random.default_rng(seed)
    q = padded_rows(rng, heads[0], rows, n, d, dtype)
    k, v = (padded_rows(rng, heads[1], rows, n, d, dtype) for _ in range(2))
    shape = (-(-n // bs) + 2, heads[1], bs, d)
    slots = np.full(rows, -1, np.int32)
    slots[:n] = rng.permutation(shape[0] * bs)[:n]
    return q, k, v, garbage(rng, shape, dtype), garbage(rng, shape, dtype), slots


@given(
    seed=seeds,
    heads=gqa,
    tiles=st.integers(1, 3),
    data=st.data(),
    d=st.sampled_from([64, 128, 32, 80, 96]),
    block_size=st.sampled_from([16, 32, 64, 128]),
    dtype=dtypes,
    scale=st.sampled_from([None, 0.1, 1.0]),
)
def test_equals_the_reference(
    seed: int,
    heads: tuple[int, int],
    tiles: int,
    data: st.DataObject,
    d: int,
    block_size: int,
    dtype: npt.DTypeLike,
    scale: float | None,
) -> None:
    n = data.draw(st.integers(0, tiles * 128))
    q, k, v, k_cache, v_cache, slots = chunk(seed, heads, tiles * 128, n, d, block_size, dtype)
    expected_caches = k_cache.copy(), v_cache.copy()
    expected, _, _ = reference.padded_prefill(q, k, v, *expected_caches, slots, n, scale=scale)
    out, returned_k, returned_v = padded_prefill(q, k, v, k_cache, v_cache, slots, n, scale=scale)
    assert_close(out[:, :n], expected[:, :n])
    np.testing.assert_array_equal(out[:, n:].astype(float), 0.0)
    assert returned_k is k_cache
    assert returned_v is v_cache
    for written, wanted in zip((k_cache, v_cache), expected_caches, strict=True):
        assert written.tobytes() == wanted.tobytes()


@settings(max_examples=3)
@given(seed=seeds, n=st.integers(2049, 2304))
def test_rows_beyond_one_softmax_step_continue_it(seed: int, n: int) -> None:
    q, k, v, k_cache, v_cache, slots = chunk(seed, (1, 1), 2304, n, 64, 128, np.float32)
    expected, _, _ = reference.padded_prefill(q, k, v, k_cache.copy(), v_cache.copy(), slots, n)
    out, _, _ = padded_prefill(q, k, v, k_cache, v_cache, slots, n)
    assert_close(out, expected)
