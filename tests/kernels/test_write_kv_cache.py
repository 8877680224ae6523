"""write_kv_cache against the float64 reference: bit copies of exactly the named rows."""

import ml_dtypes
import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels import write_kv_cache
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import garbage, seeds


@given(
    seed=seeds,
    num_kv_heads=st.integers(1, 5),
    num_tokens=st.integers(1, 300) | st.sampled_from([1, 127, 128, 129, 256]),
    d=st.sampled_from([64, 128, 32, 80, 96]),
    block_size=st.sampled_from([16, 32, 64, 128]),
    padding=st.floats(0, 1),
    dtype=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
)
def test_writes_exactly_the_slots(
    seed: int,
    num_kv_heads: int,
    num_tokens: int,
    d: int,
    block_size: int,
    padding: float,
    dtype: npt.DTypeLike,
) -> None:
    rng = np.random.default_rng(seed)
    num_blocks = -(-num_tokens // block_size) + 2
    shape = (num_blocks, num_kv_heads, block_size, d)
    k, v = (garbage(rng, (num_kv_heads, num_tokens, d), dtype) for _ in range(2))
    k[:, ::2] = rng.standard_normal(k[:, ::2].shape).astype(dtype)
    slots = rng.permutation(num_blocks * block_size)[:num_tokens].astype(np.int32)
    slots[rng.random(num_tokens) < padding] = -1
    caches = [rng.standard_normal(shape).astype(dtype) for _ in range(2)]
    expected = [cache.copy() for cache in caches]
    reference.write_kv_cache(k, v, expected[0], expected[1], slots)
    returned = write_kv_cache(k, v, caches[0], caches[1], slots)
    assert returned[0] is caches[0]
    assert returned[1] is caches[1]
    for written, wanted in zip(caches, expected, strict=True):
        assert written.tobytes() == wanted.tobytes()
