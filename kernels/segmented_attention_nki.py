"""segmented_attention: causal attention of a chunk over its paged prior and itself.

Formula. Row i < num_tokens stands at position prior_tokens + i. For query head h on KV head g:
    out[h, i] = softmax over the keys at positions 0 .. prior_tokens + i of
                scale * q[h, i] . key[g, j], times value[g, j]
Keys and values at positions < prior_tokens come from the cache through block_table (-1: absent),
the others from k and v. Rows >= num_tokens are zero.

Supported range. S a multiple of 128, head_dim up to 128, H a multiple of KV, block_size a power of
two, any prior_tokens that the table covers, kv_segment_size a multiple of 128 and of block_size;
bf16, fp16 or fp32, one dtype throughout. block_table is padded with -1 to whole segments. Unused
cache rows and padded rows may hold NaN or infinity. `segattn.kernels.segmented_attention` checks
arguments; the kernel only asserts shapes.

Loop nest. KV head -> the chunk over itself (attend.py), then segment of the prior (runtime count)
-> query head of the group -> row tile of 128 queries -> step of at most 2048 keys.

Layouts. With r = kv_segment_size / 128, token p * r + j of a segment lies on partition p, so that
a partition is filled by long runs of the cache; key tile j is the tokens j, r + j, 2 r + j, ...
k_t [d, segment]: column j * 128 + p. Masks are made in token order and read with stride r.

On-chip memory per partition: that of padded_prefill, plus for a segment of s tokens, element size
b: staged and zeroed rows 4 r d b, k_t s b, mask and positions 9 s. s = 2048, d = 128, bf16:
16 + 4 + 18 = 38 KiB.

Numerics. Products and sums in fp32, weights rounded to the dtype of v before P V; the running
maximum is exact, so a later segment rescales the earlier ones by exp(old - new) <= 1.
"""

from .attend import attend_chunk, store_rows
from .backend import nisa, nki, nl
from .loading import RowTiles, broadcast_number, number_register, transpose_row_tiles
from .masks import causal_mask, valid_rows
from .paged_cache import PagedSegments
from .softmax import next_step, score_tile
from .tile_schedule import MACRO_TILES, PARTITIONS


def attend_prior(
    prior: PagedSegments,
    prior_tokens: nl.NkiTensor,  # [1, 1] int32 HBM
    kv_head: int,
    q_t: nl.NkiTensor,  # [d, rows] SBUF
    neg_shift: nl.NkiTensor,  # [128, rows / 128] fp32, softmax state, updated
    row_sum: nl.NkiTensor,  # [128, rows / 128] fp32, updated
    acc: nl.NkiTensor,  # [128, rows / 128 * d] fp32, updated
    scale: float,
) -> None:
    """Continue the softmax of every row tile of a KV head with the cached tokens."""
    d = prior.d
    remaining = broadcast_number(prior_tokens)
    first_block = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=first_block, value=0)

    def segment(i: nisa.VirtualRegister) -> None:
        keys, values, seen = prior.load(0, first_block, remaining, kv_head)
        k_t = transpose_row_tiles(RowTiles(keys, d, d), prior.tokens)
        for t in range(row_sum.shape[1]):
            for first in range(0, prior.tokens, MACRO_TILES):
                count = min(MACRO_TILES, prior.tokens - first)
                scores = score_tile(
                    q_t[:, t * PARTITIONS : (t + 1) * PARTITIONS],
                    k_t[:, first * PARTITIONS : (first + count) * PARTITIONS],
                )
                next_step(
                    scores,
                    prior.mask_columns(seen, PARTITIONS, first, count),
                    RowTiles(values, d, d, first * d),
                    scale,
                    neg_shift[:, t : t + 1],
                    row_sum[:, t : t + 1],
                    acc[:, t * d : (t + 1) * d],
                )
        prior.advance(first_block, remaining)

    nl.fori_loop(0, number_register(prior_tokens), segment, step=prior.segment_size)


@nki.jit
def segmented_attention_kernel(
    q: nl.NkiTensor,  # [H, S, d]
    k: nl.NkiTensor,  # [KV, S, d]
    v: nl.NkiTensor,  # [KV, S, d]
    k_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d]
    v_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d]
    block_table: nl.NkiTensor,  # [1, segments * kv_segment_size / block_size] int32
    prior_tokens: nl.NkiTensor,  # [1, 1] int32
    num_tokens: nl.NkiTensor,  # [1, 1] int32
    kv_segment_size: int,
    scale: float,
) -> nl.NkiTensor:
    """Attention [H, S, d] of the chunk over its prior and itself."""
    num_q_heads, num_rows, _ = q.shape
    num_kv_heads = k.shape[0]
    assert num_rows % PARTITIONS == 0, "the number of rows must be a multiple of 128"
    assert num_q_heads % num_kv_heads == 0, "query heads must be a multiple of KV heads"
    assert kv_segment_size % PARTITIONS == 0, "kv_segment_size must be a multiple of 128"
    assert kv_segment_size % k_cache.shape[2] == 0, "kv_segment_size must be whole blocks"
    num_tiles = num_rows // PARTITIONS
    group = num_q_heads // num_kv_heads
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    valid = valid_rows(broadcast_number(num_tokens), num_tiles)
    causal = causal_mask(min(num_tiles, MACRO_TILES))
    prior = PagedSegments(k_cache, v_cache, block_table, kv_segment_size, 1)
    for kv_head in range(num_kv_heads):
        q_t, neg_shift, row_sum, acc = attend_chunk(q, k, v, kv_head, valid, causal, scale)
        attend_prior(prior, prior_tokens, kv_head, q_t, neg_shift, row_sum, acc, scale)
        store_rows(out, kv_head * group * num_rows, group, row_sum, acc, valid)
    return out
