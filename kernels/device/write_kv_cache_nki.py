"""write_kv_cache: store each token's K and V in its slot of the paged cache.

Formula. For every token t with slot_mapping[t] = s >= 0 and every KV head h:
    k_cache[s // block_size, h, s % block_size] = k[h, t] / k_scale[h], likewise v,
in a cache of one byte held within +-240 (e5m2: 57344, int8: 127), rounded to the cache's dtype.

Supported range and errors. Any number of tokens T >= 1 with T * (KV + 4) <= 350,000; KV * d <=
16,384; block_size a power of two; caches in the dtype of k and v, or of one byte. Slots are
distinct and below num_blocks * block_size; -1 is skipped. `segattn.kernels.write_kv_cache` raises
ValueError for anything else; the kernel only asserts shapes.

Loop nest. Keys, values -> KV head -> 128 runs of tokens: one load, one scatter; then 128 pairs of a
single token and a KV head: one gather, one scatter. cache_writer.py has the pipeline and what a
pre-transposed K cache [num_blocks, KV, d, block_size] needs besides.

Layouts. A run of up to 4 KiB or a single token of a KV head on each partition.

On-chip memory per partition. Indices: 4 B for each 128 runs of a head and 12 B for each 128 single
pairs; 4 KiB per tile in flight, with scales some 14 KiB; pre-transposed keys 16 to 40 KiB.

Numerics. Without scales bit copies. With scales one fp32 multiplication by the reciprocal, which
DVE rounds correctly to about one unit in the last place, then one rounding to the cache's dtype.
"""

from ..backend import nki, nl
from .cache_writer import Source


@nki.jit
def write_kv_cache_kernel(
    k: nl.NkiTensor,  # [KV, T, d]
    v: nl.NkiTensor,  # [KV, T, d]
    k_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d], changed in place
    v_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d], changed in place
    writes: nl.NkiTensor,  # plan.cache_writes.CacheWrites of the values, and of keys in rows
    run: int,
    k_scales: nl.NkiTensor | None = None,  # [1, KV] fp32
    v_scales: nl.NkiTensor | None = None,  # [1, KV] fp32
    key_writes: nl.NkiTensor | None = None,  # of the keys, when the K cache is pre-transposed,
    key_run: int = 0,  # [num_blocks, KV, d, block_size]
) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Store k and v; returns the caches."""
    assert k.shape[:2] == v.shape[:2], "k and v must have the same heads and tokens"
    keys = Source(k, k_cache, k_scales, writes, run)
    if key_writes is None:
        assert k_cache.shape[:3] == v_cache.shape[:3], "caches must have the same blocks"
    else:
        keys = Source(k, k_cache, k_scales, key_writes, key_run, pre_transposed=True)
    writes_left = [keys.work(), Source(v, v_cache, v_scales, writes, run).work()]
    while writes_left:
        # In turn: a scatter may touch any row of its cache, so two into one wait for each other.
        writes_left = [each for each in writes_left if next(each, True) is None]
    return k_cache, v_cache
