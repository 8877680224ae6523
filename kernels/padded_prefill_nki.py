"""padded_prefill: causal attention of a chunk without prior, fused with its cache write.

Formula. For query head h, row i < num_tokens, KV head g = h // (H / KV):
    out[h, i] = softmax over j <= i of scale * q[h, i] . k[g, j], times v[g, j]
Rows >= num_tokens are zero. k and v are stored through slot_mapping as in write_kv_cache.

Supported range. S a multiple of 128, head_dim up to 128, H a multiple of KV, bf16, fp16 or fp32.
Rows >= num_tokens of q, k, v may hold NaN or infinity. `segattn.kernels.padded_prefill` checks
arguments; the kernel only asserts shapes.

Loop nest. KV head -> query head of its group -> row tile of 128 queries -> step of at most 2048
keys up to the diagonal (one matmul per 512 keys, one softmax step, 128-key tiles into P V).

Layouts. q_t [d, G * S] and k_t [d, S]: column = row of the chunk; values [128, S / 128 * d]: row
t * 128 + p on partition p. Scores [128 queries, keys] in PSUM, weights transposed by PE.

On-chip memory per partition, element size b, tiles n = S / 128, group G: rows before transposing
2 G n d b, q_t G S b, k and k_t 2 n d b + S b, values 2 n d b, acc 4 G n d, mask 2048 * 5, step
2048 * (4 + 2 b). S = 2048, G = 4, d = 128, bf16: 32 + 16 + 12 + 8 + 32 + 10 + 16 = 126 KiB.
PSUM: scores 4 banks, transposes 1, P V 1.

Numerics. Products and sums in fp32; weights are rounded to the dtype of v before P V.
"""

from .attend import attend_chunk, store_rows
from .backend import nki, nl
from .loading import broadcast_number
from .masks import causal_mask, valid_rows
from .tile_schedule import MACRO_TILES, PARTITIONS
from .write_kv_cache_nki import store_chunk


@nki.jit
def padded_prefill_kernel(
    q: nl.NkiTensor,  # [H, S, d]
    k: nl.NkiTensor,  # [KV, S, d]
    v: nl.NkiTensor,  # [KV, S, d]
    k_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d], changed in place
    v_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d], changed in place
    slot_mapping: nl.NkiTensor,  # [S] int32
    num_tokens: nl.NkiTensor,  # [1, 1] int32
    scale: float,
) -> tuple[nl.NkiTensor, nl.NkiTensor, nl.NkiTensor]:
    """Attention [H, S, d] of the chunk over itself, and the two caches."""
    num_q_heads, num_rows, _ = q.shape
    num_kv_heads = k.shape[0]
    assert num_rows % PARTITIONS == 0, "the number of rows must be a multiple of 128"
    assert num_q_heads % num_kv_heads == 0, "query heads must be a multiple of KV heads"
    num_tiles = num_rows // PARTITIONS
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    store_chunk(k, v, k_cache, v_cache, slot_mapping)
    valid = valid_rows(broadcast_number(num_tokens), num_tiles)
    causal = causal_mask(min(num_tiles, MACRO_TILES))
    group = num_q_heads // num_kv_heads
    for kv_head in range(num_kv_heads):
        _, _, row_sum, acc = attend_chunk(q, k, v, kv_head, valid, causal, scale)
        store_rows(out, kv_head * group * num_rows, group, row_sum, acc, valid)
    return out, k_cache, v_cache
