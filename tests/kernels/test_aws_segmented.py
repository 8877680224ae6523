"""The call of AWS's segmented kernel against the float64 reference."""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels.aws_segmented import attention_segmented_cte
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    Array,
    assert_close,
    block_sizes,
    dtypes,
    garbage,
    normal,
    paged_tokens,
    seeds,
)

BF16 = ml_dtypes.bfloat16
LAYOUTS = st.sampled_from(["rows", "transposed", "packed"])


def stored_keys(k_cache: Array, layout: str) -> Array:
    """A K cache [num_blocks, KV, block_size, d] in a layout of AWS's."""
    num_blocks, num_kv_heads, block_size, d = k_cache.shape
    if layout == "transposed":
        columns = np.empty((num_blocks * num_kv_heads, d, block_size), k_cache.dtype)
        for index in range(len(columns)):
            columns[index] = k_cache[index // num_kv_heads, index % num_kv_heads].T
        return columns
    if layout == "packed":
        pairs = np.empty((num_blocks, block_size // 2, num_kv_heads * d, 2), k_cache.dtype)
        for head in range(num_kv_heads):
            for token in range(block_size):
                features = slice(head * d, (head + 1) * d)
                pairs[:, token // 2, features, token % 2] = k_cache[:, head, token]
        return pairs
    return k_cache


@given(
    seed=seeds,
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    priors=st.lists(st.integers(0, 300), min_size=1, max_size=2),
    shared_prior=st.booleans(),
    real=st.integers(1, 128),
    block_size=block_sizes.filter(lambda size: size > 1),  # packed in pairs
    layout=LAYOUTS,
    tp_q=st.booleans(),
    tp_out=st.booleans(),
    window=st.none() | st.integers(0, 300),
    with_sink=st.booleans(),
    fp8=st.booleans(),
    dtype=dtypes,
    lnc=st.sampled_from([1, 2]),
)
def test_equals_the_reference(
    seed: int,
    heads: tuple[int, int],
    priors: list[int],
    shared_prior: bool,
    real: int,
    block_size: int,
    layout: str,
    tp_q: bool,
    tp_out: bool,
    window: int | None,
    with_sink: bool,
    fp8: bool,
    dtype: npt.DTypeLike,
    lnc: int,
) -> None:
    rng = np.random.default_rng(seed)
    num_q_heads, num_kv_heads = heads
    d, rows = 64, 128
    if shared_prior:
        priors = [priors[0]] * len(priors)
    is_fp8 = fp8 and np.dtype(dtype).itemsize == 2
    cache_dtype = ml_dtypes.float8_e4m3fn if is_fp8 else dtype
    scales = rng.uniform(0.1, 0.5, 2).astype(np.float32) if is_fp8 else np.ones(2, np.float32)
    paged = paged_tokens(
        rng, [prior + real for prior in priors], num_kv_heads, d, block_size, cache_dtype
    )
    # The chunk's blocks end with its real rows; the table covers the padded rows as well.
    width = -(-(max(priors) + rows) // block_size)
    tables = np.full((len(priors), width), -1, np.int32)
    for request, prior in enumerate(priors):
        used = -(-(prior + real) // block_size)
        tables[request, :used] = paged.tables[request, :used]
    q = garbage(rng, (len(priors) * num_q_heads, rows, d), dtype)
    q[:, :real] = normal(rng, (len(q), real, d), dtype)
    sink = rng.uniform(-3, 3, (len(q), 1)).astype(np.float32) if with_sink else None
    out = attention_segmented_cte(
        q if tp_q else np.ascontiguousarray(q.swapaxes(1, 2)),
        stored_keys(paged.k_cache, layout), paged.v_cache, tables,
        np.array([[priors[0]]] if shared_prior else [[prior] for prior in priors], np.int32),
        block_size, 256, 0.2, tp_q, tp_out, window, sink, num_q_heads,
        layout == "transposed", layout == "packed",
        np.full((128, 1), scales[0]), np.full((128, 1), scales[1]), lnc=lnc,
    )  # fmt: skip
    out = out.swapaxes(1, 2) if tp_out else out
    for request, prior in enumerate(priors):
        positions = np.arange(prior, prior + real)
        blocks, offsets = tables[request, positions // block_size], positions % block_size
        k, v = (
            cache[blocks, :, offsets].swapaxes(0, 1).astype(np.float64) * scale
            for cache, scale in zip((paged.k_cache, paged.v_cache), scales, strict=True)
        )
        rows_of_request = slice(request * num_q_heads, (request + 1) * num_q_heads)
        expected = reference.segmented_attention(
            q[rows_of_request, :real], k, v, paged.k_cache, paged.v_cache, tables[request],
            prior, real, scale=0.2, sliding_window=window or None,
            sinks=None if sink is None else sink[rows_of_request, 0],
            k_scale=float(scales[0]), v_scale=float(scales[1]),
        )  # fmt: skip
        assert_close(out[rows_of_request, :real], expected)
        padded = -(-(prior + real) // block_size) * block_size - prior
        assert not out[rows_of_request, padded:].astype(float).any()


def call(**changes: Any) -> dict[str, Any]:
    """A call of one request with 16 prior tokens in blocks of 16, with changes."""
    rng = np.random.default_rng(0)
    arguments: dict[str, Any] = {
        "q": rng.standard_normal((2, 128, 64)).astype(np.float32),
        "k_cache": rng.standard_normal((12, 1, 16, 64)).astype(np.float32),
        "v_cache": rng.standard_normal((12, 1, 16, 64)).astype(np.float32),
        "block_tables": np.arange(9, dtype=np.int32)[None],
        "prior_tokens": np.array([[16]], np.int32),
        "block_size": 16,
        "prior_seg_size": 512,
        "num_q_heads": 2,
    }
    return {**arguments, **changes}


def test_a_shared_prior_hole_is_absent_and_a_hole_in_the_chunk_is_refused() -> None:
    table = np.arange(9, dtype=np.int32)[None].copy()
    table[0, 0] = -1
    out = attention_segmented_cte(**call(block_tables=table))
    no_prior = call(block_tables=np.arange(1, 9, dtype=np.int32)[None])
    expected = attention_segmented_cte(**{**no_prior, "prior_tokens": np.zeros((1, 1), np.int32)})
    np.testing.assert_allclose(out, expected, atol=1e-5)
    table[0, 4] = -1
    with pytest.raises(ValueError, match="block_tables: -1 at 4 within the chunk, must be behind"):
        attention_segmented_cte(**call(block_tables=table))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 32}, "block_size=32: must be one of 16"),
        ({"num_q_heads": 1}, "num_q_heads=1: must be one of 2.0"),
        ({"prior_tokens": np.array([[17]], np.int32)}, r"must cover 145"),
        ({"prior_tokens": np.array([[-1]], np.int32)}, r"prior_tokens=-1: must be within 0..144"),
        ({"prior_tokens": np.zeros((3, 1), np.int32)}, r"prior_tokens.size=3: must be one of 1"),
        ({"prior_seg_size": 100}, "kv_segment_size=100: must be a positive multiple of 128"),
        ({"sink": np.zeros(3, np.float32)}, r"sink.size=3: must be one of 2"),
        ({"k_pre_transposed": True}, r"k_cache: shape \(12, 1, 16, 64\) must be \(12, 64, 16\)"),
        ({"k_scale": np.arange(1, 129)}, r"k_scale=(?s:.*): must repeat one positive number"),
        ({"v_scale": 0.0}, r"v_scale=\[0\.\]: must repeat one positive number"),
        ({"kvp_group_size": 2}, "kvp_group_size=2: the KV-parallel mode is not supported"),
        ({"kvp_rank_id": np.zeros((1, 1))}, "kvp_rank_id=.*KV-parallel mode is not supported"),
    ],
)
def test_what_is_rejected_names_the_argument(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_segmented_cte(**call(**change))
