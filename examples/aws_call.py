"""A call written for AWS's attention_segmented_cte, unchanged but for its import."""

import ml_dtypes
import numpy as np

from segattn.kernels.aws_segmented import attention_segmented_cte
from segattn.reference import attention as reference

rng = np.random.default_rng(0)
q = rng.standard_normal((4, 128, 64)).astype(ml_dtypes.bfloat16)  # [B * heads, S, d]
k_cache, v_cache = rng.standard_normal((2, 20, 2, 16, 64)).astype(ml_dtypes.bfloat16)
block_tables = rng.permutation(20)[None, :12].astype(np.int32)  # 64 cached tokens, then the chunk

out = attention_segmented_cte(
    q=q,
    k_cache=k_cache,
    v_cache=v_cache,
    block_tables=block_tables,
    prior_tokens=np.array([[64]], np.int32),
    block_size=16,
    prior_seg_size=512,
    scale=64**-0.5,
    num_q_heads=4,
)

blocks = block_tables[0, 4:]  # of the chunk
k, v = (each[blocks].swapaxes(0, 1).reshape(2, 128, 64) for each in (k_cache, v_cache))
expected = reference.segmented_attention(q, k, v, k_cache, v_cache, block_tables[0], 64, 128)
error = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
print(f"64 cached tokens and a chunk of 128, relative error against float64: {error:.1e}")
