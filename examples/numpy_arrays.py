"""Host functions on NumPy arrays: a prompt in two chunks, then one decode step."""

import numpy as np
import numpy.typing as npt

from segattn.kernels import padded_prefill, paged_decode, segmented_attention, write_kv_cache
from segattn.reference import attention as reference

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((heads, 300, 64)).astype(np.float32) for heads in (4, 2, 2))
k_cache, v_cache = np.full((2, 16, 2, 32, 64), np.nan, np.float32)  # 16 blocks of 32 tokens
table = rng.permutation(16)[:12].astype(np.int32)  # blocks of a request of up to 384 tokens


def slots(first: int, last: int, rows: int) -> npt.NDArray[np.int32]:
    """Where the tokens first..last-1 lie in the cache; -1 for padding up to `rows`."""
    position = np.arange(first, first + rows)
    return np.where(position < last, table[position // 32] * 32 + position % 32, -1).astype(
        np.int32
    )


# The first 128 tokens. The second chunk has 160 tokens, 256 rows with padding.
first, _, _ = padded_prefill(
    q[:, :128], k[:, :128], v[:, :128], k_cache, v_cache, slots(0, 128, 128), 128
)
q2, k2, v2 = (np.pad(each[:, 128:288], ((0, 0), (0, 96), (0, 0))) for each in (q, k, v))
write_kv_cache(k2, v2, k_cache, v_cache, slots(128, 288, 256))
second = segmented_attention(q2, k2, v2, k_cache, v_cache, table, 128, 160)

# The next token: store its key and value, attend over the cache.
write_kv_cache(k[:, 288:289], v[:, 288:289], k_cache, v_cache, slots(288, 289, 1))
step = paged_decode(q[None, :, 288:289], k_cache, v_cache, table[None], np.array([289], np.int32))

out = np.concatenate([first, second[:, :160], step[0]], axis=1)
nothing = np.zeros((0, 2, 32, 64)), np.zeros((0, 2, 32, 64)), np.zeros(0, np.int32)
expected = reference.segmented_attention(q[:, :289], k[:, :289], v[:, :289], *nothing, 0, 289)
error = float(np.abs(out - expected).max())
print(f"289 tokens in two chunks and a decode step, largest error against float64: {error:.1e}")
