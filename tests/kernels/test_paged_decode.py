"""paged_decode against the float64 reference."""

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels import paged_decode
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    assert_close,
    dtypes,
    garbage,
    gqa,
    normal,
    paged_tokens,
    seeds,
)


@given(
    seed=seeds,
    heads=gqa | st.sampled_from([(16, 16), (32, 4)]),
    lengths=st.lists(st.integers(0, 700) | st.just(0), min_size=1, max_size=4),
    d=st.sampled_from([64, 128, 32, 80, 96]),
    block_size=st.sampled_from([16, 32, 64, 128]),
    holes=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=dtypes,
    scale=st.sampled_from([None, 0.1, 1.0]),
)
def test_equals_the_reference(
    seed: int,
    heads: tuple[int, int],
    lengths: list[int],
    d: int,
    block_size: int,
    holes: float,
    dtype: npt.DTypeLike,
    scale: float | None,
) -> None:
    rng = np.random.default_rng(seed)
    paged = paged_tokens(rng, lengths, heads[1], d, block_size, dtype, holes=holes)
    q = garbage(rng, (len(lengths), heads[0], 1, d), dtype)
    for request, length in enumerate(lengths):
        if length:
            q[request] = normal(rng, (heads[0], 1, d), dtype)
    context_lens = np.array(lengths, np.int32)
    arguments = (q, paged.k_cache, paged.v_cache, paged.tables, context_lens)
    expected = reference.paged_decode(*arguments, scale=scale)
    out = paged_decode(*arguments, scale=scale)
    assert out.dtype == q.dtype
    assert_close(out, expected)
    np.testing.assert_array_equal(out[context_lens == 0].astype(float), 0.0)
