"""write_kv_cache: store each token's K and V in its slot of the paged cache.

Formula. For every token t with slot_mapping[t] = s >= 0 and every KV head h:
    k_cache[s // block_size, h, s % block_size] = k[h, t], likewise v.

Supported range. Any number of tokens >= 1, any KV heads, head_dim up to 512, block_size a power of
two; k, v and the caches share one dtype. Slots are distinct and below num_blocks * block_size; -1
is skipped. `segattn.kernels.write_kv_cache` checks all of it; the kernel only asserts shapes.

Loop nest. tiles of 128 tokens: one scatter for K, one for V, all KV heads in each.

Layouts. Token t sits on partition t % 128 of the index tile [128, tiles]; data goes HBM to HBM.

On-chip memory. Three index tiles, 12 B per 128 tokens and partition: 768 B at T = 8192.

Numerics. Bit copies.
"""

from .backend import nki, nl
from .paged_cache import scatter_chunk, slot_rows
from .tile_schedule import PARTITIONS


def store_chunk(
    k: nl.NkiTensor,  # [KV, T, d]
    v: nl.NkiTensor,  # [KV, T, d]
    k_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d]
    v_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d]
    slot_mapping: nl.NkiTensor,  # [T] int32
) -> None:
    """Scatter a chunk into both caches: whole tiles of 128 tokens, then the rest."""
    num_kv_heads, num_tokens, _ = k.shape
    block_size = k_cache.shape[2]
    full_tiles = num_tokens // PARTITIONS
    rest = num_tokens - full_tiles * PARTITIONS
    if full_tiles > 0:
        rows = slot_rows(slot_mapping, 0, PARTITIONS, full_tiles, block_size, num_kv_heads)
        scatter_chunk(k, k_cache, rows, 0)
        scatter_chunk(v, v_cache, rows, 0)
    if rest > 0:
        first = full_tiles * PARTITIONS
        rows = slot_rows(slot_mapping, first, rest, 1, block_size, num_kv_heads)
        scatter_chunk(k, k_cache, rows, first)
        scatter_chunk(v, v_cache, rows, first)


@nki.jit
def write_kv_cache_kernel(
    k: nl.NkiTensor,
    v: nl.NkiTensor,
    k_cache: nl.NkiTensor,
    v_cache: nl.NkiTensor,
    slot_mapping: nl.NkiTensor,
) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Store k, v [KV, T, d] through slot_mapping [T]; the caches change in place."""
    assert k.shape == v.shape, "k and v must have one shape"
    assert k_cache.shape == v_cache.shape, "k_cache and v_cache must have one shape"
    store_chunk(k, v, k_cache, v_cache, slot_mapping)
    return k_cache, v_cache
