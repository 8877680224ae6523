"""segmented_attention: causal attention of a chunk over its paged prior and itself.

Formula. Row i < num_tokens stands at position p = prior_tokens + i. For query head h on KV head g:
    out[h, i] = softmax over the keys at positions max(0, p - sliding_window + 1) .. p of
                scale * q[h, i] . key[g, j], times value[g, j]
where sinks[h] joins the sum of the softmax as one more logit without a value. Keys and values at
positions < prior_tokens come from the cache through block_table (-1: absent) as stored value times
k_scale[g] or v_scale[g], the others from k and v. Rows >= num_tokens are zero.

Supported range and errors. S and head_dim as in padded_prefill, H a multiple of KV, block_size a
power of two, any prior_tokens that the table covers, kv_segment_size a multiple of 128 and of
block_size; bf16, fp16 or fp32, caches the same or fp8 with scales; one or two cores. block_table is
padded with -1 to whole segments and three more. A window needs the slots of the tokens before the
chunk (window_plan.py). k and v may be some of the cache's KV heads, consecutive ones from
first_kv_head on. Unused cache rows and padded rows may hold NaN or infinity.
`segattn.kernels.segmented_attention` raises ValueError for anything else and launches the kernel,
for some heads at a time where its program would be too long (launch_plan.py); the kernel
only asserts shapes. FloatingPointError where the check of "bounded" fails.

Loop nest. Share of the core (consecutive query heads of a KV head): the chunk over itself as in
padded_prefill, then
    bounded (prior_stream.py): pairs of whole segments (runtime count), an odd one, then the rest in
        segments of 512 -> block of 4 row tiles -> macro of 2 key tiles; the next segment is
        prepared beside
    exact (exact_rows.py): the same segments, one per trip if the share has more than 16 row tiles
        of a head, and with more than 16 in all the rest in segments of 1024 before those of 512
        -> row tile -> step of at most 2048 keys
With a window both take, instead of segments, the key tiles before the chunk that the window of some
row cuts, in sections of up to 16 (window_stream.py); if it reaches further back than 32 tiles and
the chunk, what lies between them and the chunk follows in segments of up to 2048 (runtime count).
A long chunk's last blocks are computed over the chunk after the prior, beside the results of the
others.

Layouts. With r = kv_segment_size / 128, token p * r + j of a segment lies on partition p, so that a
partition is filled by long runs of the cache; key tile j is the tokens j, r + j, 2 r + j, ... Key
columns [128 features, segment] per 128 features: column j * 128 + p. In a window's sections key
tile j is 128 consecutive tokens, token p of it on partition p, gathered one by one. With
k_pre_transposed, keys are staged in columns [features, segment] of token order
(transposed_keys.py), from which a strided copy makes key columns instead of PE; those of a window's
section with whole blocks, and the copy begins inside the first one (window_columns.py).

On-chip memory per partition: that of padded_prefill, plus for segments of s tokens, element size b,
f = ceil(d / 128): two sets of staged rows 2 r d b, key columns f s b and values r (d + 1) b. s =
2048, d = 128, bf16: 2 (8 + 4 + 4) = 32 KiB; for the tail of 512 tokens one set, zeroed key rows r d
b and a copy of columns and values: 4 + 1 + 2 = 7 KiB. Bounded with more than 4 blocks, fp32 and d =
256 take half as long segments; the exact softmax has a mask row of 2 s bytes per set. With a
window: two sections of up to 16 tiles, 2 (8 + 4 + 4) = 32 KiB, and for a long one a set of 2048
tokens with zeroed key rows and copies, 16 + 4 + 8 = 28 KiB.

Numerics. As padded_prefill; the running maximum is exact, so a later segment rescales the earlier
ones by exp(old - new) <= 1. k_scale joins the softmax scale in fp32, v_scale the accumulator.
"""

from ..backend import nki, nl
from ..sizes import PARTITIONS
from .loading import element_bytes
from .prefill.paged_prior import PagedPrior
from .prefill.share_loop import ShareLoop
from .tile_schedule import core_shares


@nki.jit
def segmented_attention_kernel(
    q: nl.NkiTensor,  # [H, S, d]
    k: nl.NkiTensor,  # [KV, S, d]
    v: nl.NkiTensor,  # [KV, S, d]
    k_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d]
    v_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d]
    block_table: nl.NkiTensor,  # [1, blocks of whole segments and of three more] int32
    prior_tokens: nl.NkiTensor,  # [1, 1] int32
    num_tokens: nl.NkiTensor,  # [1, 1] int32
    kv_segment_size: int,
    scale: float,
    window: int | None,
    sinks: nl.NkiTensor | None,  # [1, H] fp32
    k_scales: nl.NkiTensor | None,  # [1, KV] fp32
    v_scales: nl.NkiTensor | None,  # [1, KV] fp32
    softmax: str,  # "exact", "bounded", or "auto": bounded, then exact where the check fails
    k_pre_transposed: bool = False,  # the K cache is [num_blocks, KV, d, block_size]
    window_slots: nl.NkiTensor | None = None,  # [1, tokens] int32, with a window above 1
    first_kv_head: nl.NkiTensor | None = None,  # [1, 1] int32: the cache's head that is k[0]
    window_blocks: nl.NkiTensor | None = None,  # [1, blocks] int32, with a window above 1 and
    window_seen: nl.NkiTensor | None = None,  # [1, tokens] uint8, k_pre_transposed
) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Attention [H, S, d] of the chunk over its prior and itself, and the flags [cores, H]."""
    num_q_heads, num_rows, d = q.shape
    num_kv_heads = k.shape[0]
    assert num_rows % PARTITIONS == 0, "the number of rows must be a multiple of 128"
    assert num_q_heads % num_kv_heads == 0, "query heads must be a multiple of KV heads"
    assert kv_segment_size % PARTITIONS == 0, "kv_segment_size must be a multiple of 128"
    assert kv_segment_size % v_cache.shape[2] == 0, "kv_segment_size must be whole blocks"
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    core = nl.program_id(0)
    num_cores = nl.num_programs(0)
    loop = ShareLoop(q, k, v, out, num_tokens, scale, window, sinks, softmax)
    prior = PagedPrior(
        k_cache, v_cache, block_table, prior_tokens, window_slots, kv_segment_size, window,
        num_rows, q.dtype, k_scales, v_scales, k_pre_transposed, first_kv_head,
        window_blocks, window_seen,
    )  # fmt: skip
    shares = core_shares(
        num_q_heads, num_q_heads // num_kv_heads, num_rows // PARTITIONS, d,
        element_bytes(q.dtype), core, num_cores,
    )  # fmt: skip
    loop.run(shares, prior, None)
    return out, loop.store_flags(core, num_cores)
