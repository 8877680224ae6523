"""segmented_attention against the float64 reference."""

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels import segmented_attention
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import assert_close, dtypes, gqa, padded_rows, paged_tokens, seeds


@given(
    seed=seeds,
    heads=gqa,
    tiles=st.integers(1, 2),
    data=st.data(),
    prior=st.integers(0, 700) | st.sampled_from([127, 128, 256, 384, 512]),
    segment=st.sampled_from([128, 256, 384, 512, 2048]),
    d=st.sampled_from([64, 128, 32, 80, 96]),
    block_size=st.sampled_from([16, 32, 64, 128]),
    holes=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=dtypes,
)
def test_equals_the_reference(
    seed: int,
    heads: tuple[int, int],
    tiles: int,
    data: st.DataObject,
    prior: int,
    segment: int,
    d: int,
    block_size: int,
    holes: float,
    dtype: npt.DTypeLike,
) -> None:
    rng = np.random.default_rng(seed)
    rows = tiles * 128
    n = data.draw(st.integers(0, rows))
    paged = paged_tokens(rng, [prior], heads[1], d, block_size, dtype, holes=holes)
    q = padded_rows(rng, heads[0], rows, n, d, dtype)
    k, v = (padded_rows(rng, heads[1], rows, n, d, dtype) for _ in range(2))
    before = paged.k_cache.tobytes(), paged.v_cache.tobytes()
    expected = reference.segmented_attention(
        q, k, v, paged.k_cache, paged.v_cache, paged.tables[0], prior, n
    )
    out = segmented_attention(
        q, k, v, paged.k_cache, paged.v_cache, paged.tables[0], prior, n, kv_segment_size=segment
    )
    assert out.dtype == q.dtype
    assert_close(out[:, :n], expected[:, :n])
    np.testing.assert_array_equal(out[:, n:].astype(float), 0.0)
    assert (paged.k_cache.tobytes(), paged.v_cache.tobytes()) == before
