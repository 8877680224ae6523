"""paged_decode against the float64 reference."""

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels import paged_decode
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    Options,
    assert_close,
    block_sizes,
    dtypes,
    garbage,
    gqa,
    head_dims,
    normal,
    options,
    paged_tokens,
    seeds,
)


@given(
    seed=seeds,
    heads=gqa | st.sampled_from([(16, 16), (32, 4)]),
    lengths=st.lists(st.integers(0, 700) | st.just(0), min_size=1, max_size=4),
    num_queries=st.sampled_from([1, 1, 2, 3, 5]),
    all_queries=st.booleans(),
    data=st.data(),
    d=head_dims,
    block_size=block_sizes,
    options=options,
    holes=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=dtypes,
    scale=st.sampled_from([None, 0.1, 1.0]),
)
def test_equals_the_reference(
    seed: int,
    heads: tuple[int, int],
    lengths: list[int],
    num_queries: int,
    all_queries: bool,
    data: st.DataObject,
    d: int,
    block_size: int,
    options: Options,
    holes: float,
    dtype: npt.DTypeLike,
    scale: float | None,
) -> None:
    rng = np.random.default_rng(seed)
    cache_dtype = options.cache_dtype(dtype)
    paged = paged_tokens(rng, lengths, heads[1], d, block_size, cache_dtype, holes=holes)
    real = [num_queries] * len(lengths)
    if not all_queries:
        real = [data.draw(st.integers(0, num_queries)) for _ in lengths]
    q = garbage(rng, (len(lengths), heads[0], num_queries, d), dtype)
    for request, length in enumerate(lengths):
        if length:
            q[request, :, : real[request]] = normal(rng, (heads[0], real[request], d), dtype)
    context_lens = np.array(lengths, np.int32)
    call = (q, paged.k_cache, paged.v_cache, paged.tables, context_lens)
    arguments = {
        "query_lens": None if all_queries else np.array(real, np.int32),
        "scale": scale,
        **options.arguments(rng, heads[0]),
        **options.scales(rng, heads[1], dtype),
    }
    expected = reference.paged_decode(*call, **arguments)
    out = paged_decode(*call, **arguments)
    assert out.dtype == q.dtype
    assert_close(out, expected)
    for request, length in enumerate(lengths):
        padding = out[request, :, real[request] if length else 0 :]
        np.testing.assert_array_equal(padding.astype(float), 0.0)
