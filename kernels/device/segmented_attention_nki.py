"""segmented_attention: causal attention of a chunk over its paged prior and itself.

Formula. Row i < num_tokens stands at position p = prior_tokens + i. For query head h on KV head g:
    out[h, i] = softmax over the keys at positions max(0, p - sliding_window + 1) .. p of
                scale * q[h, i] . key[g, j], times value[g, j]
or, not causal, over all keys at positions < prior_tokens + num_tokens, < prior_tokens where k and
v are None (cross attention),
where sinks[h] joins the sum of the softmax as one more logit without a value. Keys and values at
positions < prior_tokens come from the cache through block_table (-1: absent) as stored value times
k_scale[g] or v_scale[g], the others from k and v. Rows >= num_tokens are zero.

Supported range and errors. S and head_dim as in padded_prefill, H a multiple of KV, block_size a
power of two, any prior_tokens that the table covers, kv_segment_size a multiple of 128 and of
block_size; bf16, fp16 or fp32, caches the same or of one byte; one or two cores. block_table is
padded with -1 by sizes.TABLE_PADDING tokens. A window needs the slots of the tokens before the
chunk (window_plan.py). Unused cache rows and padded rows may hold NaN or infinity.
`segattn.kernels.segmented_attention` raises ValueError for anything else; the kernel only asserts
shapes. A failed check of the bounded softmax shows in the flags.

Loop nest. Pass of the core (q_groups that share the loops: consecutive query heads of a KV head):
the first q_blocks over the chunk as in padded_prefill, then prior.py:
    device loop of long trips -> segment -> q_group -> q_block of 4 q_tiles -> kv_tile (bounded), or
        q_tile -> iteration of at most 16 kv_tiles (online); the next segment is made beside
    device loop of short trips: what is left
With a window the kv_tiles before the chunk that the window of some row cuts come first, unrolled
(window_segments.py); if it reaches further back than 32 tiles and the chunk, what lies between them
and the chunk follows in the second loop. A long chunk's last q_blocks are computed over the chunk
after the prior, beside the results of the others.

Layouts. With r = kv_segment_size / 128, token p * r + j of a segment lies on partition p, so that a
partition is filled by long runs of the cache; kv_tile j is the tokens j, r + j, 2 r + j, ... Key
columns [128 features, segment] per 128 features: column j * 128 + p. In a window's segments
kv_tile j is 128 consecutive tokens, token p of it on partition p, gathered one by one. With
k_pre_transposed, keys are staged in columns [features, segment] of token order
(key_columns.py), from which a strided copy makes key columns instead of PE.

On-chip memory per partition: that of padded_prefill, plus for segments of s tokens, element size b,
f = ceil(d / 128): for each q_group staged rows 2 s / 128 d b, and two sets of key columns f s b and
values s / 128 (d + 1) b. s = 1024, d = 128, bf16: 4 + 2 (2 + 2) = 12 KiB, and a copy of the key
rows. The exact softmax has mask rows of 2 s bytes where
cached keys are scaled or in columns. With a window: two segments of up to 16 tiles.

Numerics. As padded_prefill; the running maximum is exact, so a later segment rescales the earlier
ones by exp(old - new) <= 1. k_scale joins the softmax scale in fp32, v_scale the accumulator.
"""

from ..backend import nki, nl
from ..sizes import PARTITIONS, SoftmaxArguments
from .prefill.attend import ChunkArguments, Prefill, new_lse
from .prefill.paged_segments import PagedCache
from .prefill.prior import Prior, PriorArguments
from .prefill.window_segments import WindowTokens


@nki.jit
def segmented_attention_kernel(
    q: nl.NkiTensor,  # [H, S, d]
    k: nl.NkiTensor | None,  # [KV, S, d]; None: cross attention, with the exact softmax
    v: nl.NkiTensor | None,  # [KV, S, d]
    k_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d]
    v_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d]
    block_table: nl.NkiTensor,  # [1, blocks, TABLE_PADDING tokens of -1 at the end] int32
    prior_tokens: nl.NkiTensor,  # [1, 1] int32
    num_tokens: nl.NkiTensor,  # [1, 1] int32
    kv_segment_size: int,
    softmax: SoftmaxArguments,
    sinks: nl.NkiTensor | None = None,  # [1, H] fp32
    k_scales: nl.NkiTensor | None = None,  # [1, KV] fp32
    v_scales: nl.NkiTensor | None = None,  # [1, KV] fp32
    k_pre_transposed: bool = False,  # the K cache is [num_blocks, KV, d, block_size]
    window_slots: nl.NkiTensor | None = None,  # [1, tokens] int32, with a window above 1
    window_blocks: nl.NkiTensor | None = None,  # [1, blocks] int32, with a window above 1 and
    window_seen: nl.NkiTensor | None = None,  # [1, tokens] uint8, k_pre_transposed
) -> tuple[nl.NkiTensor, ...]:
    """Attention [H, S, d] of the chunk over prior and itself, flags [cores, H], lse [H, S]."""
    assert kv_segment_size % PARTITIONS == 0, "kv_segment_size must be a multiple of 128"
    assert kv_segment_size % v_cache.shape[2] == 0, "kv_segment_size must be whole blocks"
    softmax = SoftmaxArguments.of(softmax)
    out = nl.ndarray((*q.shape[:2], v_cache.shape[3]), dtype=q.dtype, buffer=nl.shared_hbm)
    tokens = None
    if window_slots is not None:
        tokens = WindowTokens(window_slots, window_blocks, window_seen)
    cache = PagedCache(k_cache, v_cache, block_table, k_pre_transposed)
    given = PriorArguments(cache, prior_tokens, kv_segment_size, k_scales, v_scales, tokens)
    own = None if k is None or v is None else (k, v)
    prefill = Prefill(
        ChunkArguments(q, own, num_tokens, sinks, out, new_lse(q, softmax.with_lse)),
        softmax,
        Prior(given, q, k, softmax.window),
    )  # fmt: skip
    prefill.run([])
    return (out, *prefill.results())
