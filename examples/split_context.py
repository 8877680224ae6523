"""A decode step whose context is attended in parts, merged by their log-sum-exp.

Four requests share a prefix of 96 tokens: the prefix and what follows it are two sets of keys
(cascade attention). A block table with -1 in the place of other blocks names a set; positions stay
those of the whole context. Parts may also lie on several devices (context parallelism).
"""

import numpy as np

from segattn.kernels import merge_attention, paged_decode

rng = np.random.default_rng(0)
block_size, prefix_blocks = 16, 6
k_cache, v_cache = rng.standard_normal((2, 32, 2, block_size, 64)).astype(np.float32)
q = rng.standard_normal((4, 8, 1, 64)).astype(np.float32)  # 8 query heads on 2 KV heads
own_blocks = np.arange(prefix_blocks, 30).reshape(4, 6)
tables = np.concatenate([np.tile(np.arange(prefix_blocks), (4, 1)), own_blocks], axis=1)
tables = tables.astype(np.int32)
context_lens = np.array([100, 130, 151, 192], np.int32)

of_prefix, of_rest = tables.copy(), tables.copy()
of_prefix[:, prefix_blocks:] = -1
of_rest[:, :prefix_blocks] = -1
parts = [
    paged_decode(q, k_cache, v_cache, part, context_lens, return_lse=True)
    for part in (of_prefix, of_rest)
]
outs, lses = (np.stack(each) for each in zip(*parts, strict=True))
merged, lse = merge_attention(outs, lses)

whole, whole_lse = paged_decode(q, k_cache, v_cache, tables, context_lens, return_lse=True)
error = float(max(np.abs(merged - whole).max(), np.abs(lse - whole_lse).max()))
print(f"2 sets of keys and the whole differ by at most {error:.1e}")
