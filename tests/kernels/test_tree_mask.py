"""Drafts in a tree: which of a request's new tokens each query of paged_decode sees."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segattn.kernels import DecodePlan, paged_decode
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    Options,
    assert_close,
    block_sizes,
    dtypes,
    head_dims,
    options,
    padded_rows,
    paged_tokens,
    seeds,
)
from segattn.tests.kernels.test_lse import check_lse

BF16 = ml_dtypes.bfloat16
LENGTHS = [0, 3, 7, 130, 500, 61]


def _masks(rng: np.random.Generator, lens: Any, most: int) -> Any:
    """[B, T, T]: real queries see themselves, the rest is drawn, also what is not looked at."""
    mask = rng.random((len(lens), most, most)) < 0.5
    number = np.arange(most)
    mask[:, number, number] |= number < lens[:, None]
    return mask


@settings(max_examples=40)
@given(
    seed=seeds, dtype=dtypes, heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    most=st.integers(1, 9), d=head_dims, block_size=block_sizes, holes=st.sampled_from([0.0, 0.2]),
    option=options, deterministic=st.sampled_from([None, "batch"]),
)  # fmt: skip
def test_queries_see_what_their_row_says(
    seed: int, dtype: Any, heads: tuple[int, int], most: int, d: int, block_size: int,
    holes: float, option: Options, deterministic: str | None,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    cache_dtype = option.cache_dtype(dtype)
    paged = paged_tokens(rng, LENGTHS, heads[1], d, block_size, cache_dtype, holes=holes)
    context = np.array(LENGTHS, np.int32)
    lens = np.minimum(rng.integers(0, most + 1, len(LENGTHS)), context).astype(np.int32)
    q = np.stack([padded_rows(rng, heads[0], most, n, d, dtype) for n in lens.tolist()])
    mask = _masks(rng, lens, most)
    named = option.arguments(rng, heads[0]) | option.scales(rng, heads[1], dtype)
    named |= {"query_lens": lens, "tree_mask": mask, "return_lse": True}
    call = [q, option.stored_keys(paged.k_cache), paged.v_cache, paged.tables, context]
    out, lse = paged_decode(*call, **named, deterministic=deterministic)
    expected, expected_lse = reference.paged_decode(*call, **named)
    assert_close(out, expected)
    np.testing.assert_array_equal(out[np.isneginf(expected_lse)].astype(float), 0.0)
    check_lse(lse, expected_lse, dtype)


def test_an_unseen_draft_has_no_influence_on_its_siblings() -> None:
    """With a plan that layers share."""
    rng = np.random.default_rng(0)
    paged = paged_tokens(rng, [40], 1, 64, 16, BF16)
    q = rng.standard_normal((1, 2, 3, 64)).astype(BF16)
    # Root, and two children that do not see each other.
    mask = np.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool)
    call: list[Any] = [q, paged.k_cache, paged.v_cache, paged.tables, np.array([40], np.int32)]
    plan = DecodePlan.build(*call, tree_mask=mask)
    before = paged_decode(*call[:3], plan=plan)
    block = paged.tables[0, 2]
    paged.k_cache[block, :, 6] = 3.0
    paged.v_cache[block, :, 6] = 1e30
    after = paged_decode(*call[:3], plan=plan)
    np.testing.assert_array_equal(after[:, :, [0, 2]], before[:, :, [0, 2]])
    assert (np.abs(after[:, :, 1].astype(float)) > 1e20).all()


@pytest.mark.parametrize(
    ("mask", "more", "message"),
    [
        (np.zeros((2, 3, 3), bool), {}, r"tree_mask\[0, 0, 0\]=False: must be True"),
        (np.ones((2, 3, 3)), {}, "tree_mask: dtype float64 must be bool"),
        (np.ones((1, 3, 3), bool), {}, r"tree_mask: shape \(1, 3, 3\) must be \(2, 3, 3\)"),
        (np.ones((2, 3, 3), bool), {"causal": False}, "tree_mask: must be None with causal=False"),
    ],
)
def test_other_masks_are_refused(mask: Any, more: dict[str, Any], message: str) -> None:
    cache = np.ones((3, 1, 16, 64), BF16)
    call: list[Any] = [np.ones((2, 2, 3, 64), BF16), cache, cache, np.array([[1], [2]], np.int32)]
    call.append(np.array([9, 5], np.int32))
    with pytest.raises(ValueError, match=message):
        paged_decode(*call, tree_mask=mask, **more)
