"""Several prompts in one prefill call: each is what it is alone, to the bit."""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels import segmented_attention, varlen_attention
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    Options,
    assert_close,
    block_sizes,
    dtypes,
    gqa,
    normal,
    options,
    padded_rows,
    paged_tokens,
    seeds,
)


@given(
    seed=seeds,
    heads=gqa,
    prompts=st.lists(
        st.tuples(st.integers(0, 200), st.integers(0, 300)), min_size=1, max_size=3
    ),
    padding=st.integers(0, 9),
    block_size=block_sizes,
    dtype=dtypes,
    option=options,
)  # fmt: skip
def test_equals_the_reference(
    seed: int, heads: tuple[int, int], prompts: list[tuple[int, int]], padding: int,
    block_size: int, dtype: npt.DTypeLike, option: Options,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    lengths, priors = ([each[i] for each in prompts] for i in range(2))
    real = sum(lengths)
    rows = max(1, real + padding)
    paged = paged_tokens(
        rng, priors, heads[1], 64, block_size, option.cache_dtype(dtype), holes=0.1
    )
    q, k, v = (padded_rows(rng, n, rows, real, 64, dtype) for n in (heads[0], heads[1], heads[1]))
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    call: list[Any] = [
        q, k, v, option.stored_keys(paged.k_cache), paged.v_cache, paged.tables,
        np.array(priors, np.int32), ends,
    ]  # fmt: skip
    named = {**option.arguments(rng, heads[0]), **option.scales(rng, heads[1], dtype)}
    expected, expected_lse = reference.varlen_attention(*call, **named, return_lse=True)
    out, lse = varlen_attention(*call, **named, return_lse=True)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert_close(out, expected)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    assert not out[:, real:].any()
    for prompt, (begin, end) in enumerate(pairwise(ends.tolist())):
        if begin < end:
            own = [each[:, begin:end] for each in (q, k, v)]
            alone = segmented_attention(
                own[0], own[1], own[2], call[3], call[4], paged.tables[prompt], priors[prompt],
                end - begin, **named,
            )  # fmt: skip
            assert alone.tobytes() == np.ascontiguousarray(out[:, begin:end]).tobytes()


def call_of_two_prompts() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    q, k, v = (normal(rng, (heads, 9, 32), np.float32) for heads in (2, 1, 1))
    cache = normal(rng, (4, 1, 16, 32), np.float32)
    return {
        "q": q, "k": k, "v": v, "k_cache": cache, "v_cache": cache,
        "block_tables": np.array([[1, 2], [3, -1]], np.int32),
        "prior_tokens": np.array([20, 7], np.int32), "cu_seqlens": np.array([0, 4, 9], np.int32),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cu_seqlens", [0, 4], r"cu_seqlens: shape \(2,\) must be \(3\)"),
        ("cu_seqlens", [1, 4, 9], r"cu_seqlens\[0\]=1: must begin with 0"),
        ("cu_seqlens", [0, 5, 4], r"cu_seqlens\[2\]=4: must begin with 0, ascend"),
        ("cu_seqlens", [0, 4, 10], r"cu_seqlens\[2\]=10: .* at most 9"),
        ("prior_tokens", [20, 33], r"prior_tokens\[1\]=33: must be within 0..32"),
        ("block_tables", [[1, 2], [4, -1]], r"block_tables\[1, 0\]=4: must be -1 or within 0..3"),
    ],
)
def test_a_wrong_list_of_prompts_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        varlen_attention(**{**call_of_two_prompts(), name: np.array(value, np.int32)})


def test_values_may_be_smaller_than_keys() -> None:
    call = call_of_two_prompts()
    rng = np.random.default_rng(1)
    call["q"], call["k"] = (normal(rng, (n, 9, 72), np.float32) for n in (2, 1))
    call["k_cache"] = normal(rng, (4, 1, 16, 72), np.float32)
    out = varlen_attention(**call)
    assert out.shape == (2, 9, 32)
    assert_close(out, reference.varlen_attention(**call))
