"""fp8 caches that were written elsewhere, with values above trn2's largest."""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from segattn.kernels import fp8_for_device, paged_decode, segmented_attention, write_kv_cache
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import assert_close, normal

FN = np.dtype(ml_dtypes.float8_e4m3fn)
EVERY = np.arange(256, dtype=np.uint8).view(FN)


def test_every_value_is_halved_for_a_device_that_ends_at_240() -> None:
    halved, factor = fp8_for_device(EVERY)
    assert (halved.dtype, factor) == (FN, 2.0)
    on_device = halved.view(ml_dtypes.float8_e4m3).astype(np.float64)
    values = EVERY.astype(np.float64)
    exact = np.abs(values) >= 2.0**-5
    np.testing.assert_array_equal(2 * on_device[exact], values[exact])
    small = np.isfinite(values) & ~exact
    assert (np.abs(2 * on_device[small] - values[small]) <= 2.0**-9).all()
    assert np.isnan(on_device[np.isnan(values)]).all()


def test_a_cache_within_the_range_comes_back_as_it_is() -> None:
    cache = EVERY[np.abs(EVERY.astype(np.float32)) <= 240]
    same, factor = fp8_for_device(cache)
    assert same is cache
    assert factor == 1.0


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="cache: dtype float8_e4m3 must be float8_e4m3fn"):
        fp8_for_device(EVERY.view(ml_dtypes.float8_e4m3))


def test_decode_reads_a_cache_that_another_writer_filled() -> None:
    rng = np.random.default_rng(0)
    q = normal(rng, (1, 2, 1, 64), ml_dtypes.bfloat16)
    stored = rng.uniform(-448, 448, (2, 3, 1, 16, 64)).astype(np.float32).astype(FN)
    table, lengths = np.array([[2, 1]], np.int32), np.array([21], np.int32)
    expected = reference.paged_decode(
        q, stored[0], stored[1], table, lengths, k_scale=0.003, v_scale=0.01
    )
    (k_cache, k_factor), (v_cache, v_factor) = map(fp8_for_device, stored)
    assert (k_factor, v_factor) == (2.0, 2.0)
    out = paged_decode(
        q, k_cache, v_cache, table, lengths, k_scale=0.003 * k_factor, v_scale=0.01 * v_factor
    )
    assert_close(out, expected)


@pytest.mark.parametrize("value", [248, 256, 352, 448])
@pytest.mark.parametrize("k_pre_transposed", [False, True])
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_tokens_that_the_device_would_misread_are_refused(
    value: float, k_pre_transposed: bool, name: str
) -> None:
    rng = np.random.default_rng(0)
    caches = {n: normal(rng, (4, 1, 16, 64), FN) for n in ("k_cache", "v_cache")}
    for cache in caches.values():
        cache[0] = 448  # a block that nobody names
        cache[3, 0, 5:] = 448  # behind 21 tokens
        cache[2, 0, :4] = 448  # before the window
    tables = np.array([[2, 3]], np.int32)
    options: dict[str, Any] = {"k_scale": 0.5, "v_scale": 0.5}

    def attend(window: int, prior_window: int) -> None:
        keys, values = caches["k_cache"], caches["v_cache"]
        keys = np.ascontiguousarray(keys.swapaxes(2, 3)) if k_pre_transposed else keys
        q = np.ones((1, 1, 1, 64), ml_dtypes.bfloat16)
        paged_decode(
            q, keys, values, tables, np.array([21], np.int32), sliding_window=window,
            k_pre_transposed=k_pre_transposed, **options,
        )  # fmt: skip
        segmented_attention(
            q[0], q[0], q[0], keys, values, tables[0], 21, 1, sliding_window=prior_window,
            k_pre_transposed=k_pre_transposed, **options,
        )  # fmt: skip

    attend(17, 18)
    with pytest.raises(ValueError, match=r"k_cache: holds 448 in float8_e4m3fn, .* within \+-240"):
        attend(18, 18)
    with pytest.raises(ValueError, match="k_cache: holds 448 in float8_e4m3fn"):
        attend(17, 19)
    caches[name][3, 0, 4, 63] = -value
    with pytest.raises(
        ValueError, match=f"{name}: holds -{float(FN.type(value)):g} in float8_e4m3fn"
    ):
        attend(17, 18)


def test_a_stored_nan_is_read_as_nan() -> None:
    caches = [np.ones((2, 1, 16, 64), FN) for _ in range(2)]
    k = np.full((1, 1, 64), np.nan, ml_dtypes.bfloat16)
    write_kv_cache(k, k, caches[0], caches[1], np.array([16], np.int32), k_scale=1.0, v_scale=1.0)
    q, tables = np.ones((1, 1, 1, 64), ml_dtypes.bfloat16), np.array([[1]], np.int32)
    out = paged_decode(
        q, caches[0], caches[1], tables, np.array([3], np.int32), k_scale=1.0, v_scale=1.0
    )
    assert np.isnan(out.astype(float)).all()


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(ml_dtypes.float8_e4m3, 240), (FN, 240), (ml_dtypes.float8_e5m2, 57344), (np.int8, 127)],
)
@pytest.mark.parametrize("k_pre_transposed", [False, True])
def test_what_a_cache_cannot_hold_is_stored_as_its_largest(
    dtype: npt.DTypeLike, largest: float, k_pre_transposed: bool
) -> None:
    """With a scale of 2 for head 0 and 0.5 for head 1, by hand: halves go to the even integer."""
    k = np.zeros((2, 3, 32), ml_dtypes.bfloat16)
    k[:, 0], k[:, 1], k[0, 2], k[1, 2] = 1e30, -1e30, 5.0, -1.25
    k_cache, v_cache = np.zeros((2, 2, 2, 4, 32), dtype)
    keys = np.ascontiguousarray(k_cache.swapaxes(2, 3)) if k_pre_transposed else k_cache
    scales = np.array([2.0, 0.5], np.float32)
    write_kv_cache(
        k, k, keys, v_cache, np.array([5, 1, 2], np.int32), k_scale=scales, v_scale=scales,
        k_pre_transposed=k_pre_transposed,
    )  # fmt: skip
    for cache in (keys.swapaxes(2, 3) if k_pre_transposed else keys, v_cache):
        found = cache.astype(np.float64)
        assert (found[1, :, 1] == largest).all()
        assert (found[0, :, 1] == -largest).all()
        assert (found[0, 0, 2] == (2.0 if dtype is np.int8 else 2.5)).all()
        assert (found[0, 1, 2] == (-2.0 if dtype is np.int8 else -2.5)).all()
        assert np.count_nonzero(found) == 3 * 2 * 32
