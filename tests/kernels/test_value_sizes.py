"""paged_decode with values of another size than keys, and as features of the keys (MLA)."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from segattn.kernels import DecodePlan, paged_decode
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    Options,
    assert_close,
    dtypes,
    normal,
    options,
    padded_rows,
    paged_tokens,
    seeds,
)
from segattn.tests.kernels.test_lse import check_lse

BF16 = ml_dtypes.bfloat16
LENGTHS = [0, 3, 130, 700, 61]
PLAIN = Options(None, True, None, False, 1, False, True, 0.07)

sizes = st.sampled_from([(192, 128), (576, 512), (64, 128), (40, 32), (264, 256), (320, 136)])


@settings(max_examples=30)
@given(
    seed=seeds, dtype=dtypes, size=sizes, heads=st.sampled_from([(4, 2), (16, 1), (3, 3)]),
    most=st.integers(1, 4), block_size=st.sampled_from([1, 16, 64]), option=options,
    is_latent=st.booleans(), deterministic=st.sampled_from([None, "batch"]),
)  # fmt: skip
@example(0, BF16, (576, 512), (128, 1), 1, 64, PLAIN, True, None)
@example(0, np.float32, (576, 512), (32, 1), 4, 16, PLAIN, True, None)
def test_values_have_their_own_size(
    seed: int, dtype: Any, size: tuple[int, int], heads: tuple[int, int], most: int,
    block_size: int, option: Options, is_latent: bool, deterministic: str | None,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    (d, dv), cache_dtype = size, option.cache_dtype(dtype)
    is_latent = is_latent and dv <= d
    option.k_pre_transposed = option.k_pre_transposed and not is_latent
    paged = paged_tokens(rng, LENGTHS, heads[1], d, block_size, cache_dtype, holes=0.1)
    # NaN and infinity stand where they do in the keys.
    values = normal(rng, (*paged.k_cache.shape[:3], dv), cache_dtype)
    if np.dtype(cache_dtype) != np.int8:  # which has none
        values[~np.isfinite(paged.k_cache[..., :1].astype(np.float32)).repeat(dv, 3)] = np.nan
    context = np.array(LENGTHS, np.int32)
    lens = np.minimum(rng.integers(0, most + 1, len(LENGTHS)), context).astype(np.int32)
    q = np.stack([padded_rows(rng, heads[0], most, n, d, dtype) for n in lens.tolist()])
    named = option.arguments(rng, heads[0]) | option.scales(rng, heads[1], dtype)
    named |= {"query_lens": lens, "return_lse": True, "value_dim": dv if is_latent else None}
    cache = option.stored_keys(paged.k_cache), None if is_latent else values
    call: list[Any] = [q, *cache, paged.tables, context]
    out, lse = paged_decode(*call, **named, deterministic=deterministic)
    expected, expected_lse = reference.paged_decode(*call, **named)
    assert out.shape == (*q.shape[:3], dv)
    assert_close(out, expected)
    check_lse(lse, expected_lse, dtype)


def test_the_latent_form_is_attention_over_its_view() -> None:
    """A plan that layers share, and the values as an array of their own: the same bits."""
    rng = np.random.default_rng(1)
    paged = paged_tokens(rng, [300, 40], 1, 576, 32, BF16)
    q = normal(rng, (2, 16, 1, 576), BF16)
    step: list[Any] = [paged.tables, np.array([300, 40], np.int32)]
    plan = DecodePlan.build(q, paged.k_cache, None, *step, value_dim=512)
    found = paged_decode(q, paged.k_cache, None, plan=plan, scale=192**-0.5)
    values = paged.k_cache[..., :512]
    np.testing.assert_array_equal(
        found, paged_decode(q, paged.k_cache, values, *step, scale=192**-0.5)
    )


@pytest.mark.parametrize("dtype", [BF16, np.float32])
@pytest.mark.parametrize(("rows", "requests"), [((128, 1), 9), ((8, 4), 40)])
def test_wide_tables_of_latents_fit_the_memory_on_chip(
    dtype: Any, rows: tuple[int, int], requests: int
) -> None:
    rng = np.random.default_rng(2)
    paged = paged_tokens(rng, [5, 90], 1, 576, 64, dtype, spare_blocks=200)
    tables = np.full((requests, paged.tables.shape[1]), -1, np.int32)
    tables[[0, -1]], lengths = paged.tables, np.zeros(requests, np.int32)
    lengths[[0, -1]] = 5, 90
    q = normal(rng, (requests, *rows, 576), dtype)
    call: list[Any] = [q, paged.k_cache, None, tables, lengths]
    named: dict[str, Any] = {"value_dim": 512, "lnc": 2, "sliding_window": 64}
    found = paged_decode(*call, **named)
    assert_close(found, reference.paged_decode(*call, **named))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_dim": 32}, "value_dim=32: must be None with a v_cache"),
        ({"v": None}, "value_dim without v_cache=None: must be an integer"),
        ({"v": None, "value_dim": 72}, "value_dim=72: must be at most 64, that of the keys"),
        ({"v": None, "value_dim": 36}, "value_dim=36: must be a multiple of 8 within 32..512"),
        (
            {"v": None, "value_dim": 32, "k_pre_transposed": True},
            "v_cache=None: must be an array with k_pre_transposed",
        ),
        ({"v": np.ones((3, 1, 16, 576), BF16)}, r"v_cache.shape\[3\]=576: must be a multiple of 8"),
        ({"v": np.ones((3, 1, 8, 32), BF16)}, r"v_cache: shape \(3, 1, 8, 32\) must be"),
    ],
)
def test_other_values_are_refused(change: dict[str, Any], message: str) -> None:
    cache = np.ones((3, 1, 16, 64), BF16)
    named = {name: value for name, value in change.items() if name != "v"}
    call: list[Any] = [np.ones((1, 2, 1, 64), BF16), cache, change.get("v", cache)]
    call += [np.array([[1]], np.int32), np.array([5], np.int32)]
    with pytest.raises(ValueError, match=message):
        paged_decode(*call, **named)


def test_keys_beyond_576_features_are_refused() -> None:
    cache = np.ones((3, 1, 16, 584), BF16)
    call: list[Any] = [np.ones((1, 2, 1, 584), BF16), cache, cache[..., :64]]
    call += [np.array([[1]], np.int32), np.array([5], np.int32)]
    with pytest.raises(ValueError, match=r"head_dim=584: must be a multiple of 8 within 32..576"):
        paged_decode(*call)
