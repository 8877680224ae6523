"""padded_prefill: causal attention of a chunk without prior, fused with its cache write.

Formula. For query head h, row i < num_tokens, KV head g = h // (H / KV):
    out[h, i] = softmax over max(0, i - sliding_window + 1) <= j <= i of scale * q[h, i] . k[g, j],
                times v[g, j]
where sinks[h] joins the sum of the softmax as one more logit without a value. Rows >= num_tokens
are zero. k and v are stored through slot_mapping as in write_kv_cache.

Supported range and errors. S a multiple of 128 up to 8192, S * head_dim * element size up to 4 MiB
(S = 8192 with 128 fp32 features), head_dim up to 256, H a multiple of KV, bf16, fp16 or fp32, one
or two cores. softmax="bounded": bf16 or fp32, half that size. Rows >= num_tokens of q, k, v may
hold NaN or infinity.
`segattn.kernels.padded_prefill` raises ValueError for anything else and launches the kernel, or,
where its program would be too long for all heads (launch_plan.py), chunk_attention_kernel
for some at a time and the cache write; the kernels only assert shapes. FloatingPointError where the
check of "bounded" fails; the caches are as before then.

Loop nest, of pieces in prefill/. Share of the core (heads of a KV head and rows of them, 8192 rows
in bf16 at most; those after the first rows of their heads are left out at run time when they are
padding):
    bounded (bounded.py): block of 4 row tiles, the first rows first -> macro of 2 key tiles:
        scores, one exp, and P V of the macro four before; beside: columns of the next block, the
        results of the blocks before, the cache write
    exact (exact_rows.py): row tile -> step of at most 2048 keys up to the diagonal: scores and
        maximum, weights of the step two before transposed, P V of the one three before
"auto" runs the second in loops of `flag` iterations after the first. Key tiles that a window hides
are left out in both, those that it cuts are masked (band.py).

Layouts. Query and key columns [128 features, rows] per 128 features of d; values with a column of
ones [128, S / 128 * (d + 1)]: row t * 128 + p on partition p. Tile i * heads + h of a share is row
tile i of head h. Bounded: scores [128 keys, 512 queries]. Exact: scores [128 queries, keys] in
PSUM, weights transposed by PE.
A pre-transposed K cache is written last, by transposed_key_writer.py.

On-chip memory per partition, element size b, tiles n = S / 128, row tiles m of a share of G heads,
f = ceil(d / 128) parts of the features: query rows and columns G m (d + 128 f) b, keys and values
of the chunk n (128 f + d + 1) b and a few pieces of 4 tiles before, acc 4 G m (d + 1), weights 8 *
1024 b; G m f b <= 128. S = 2048, G = 4, d = 128, bf16: 32 + 8 + 33 + 16 = 89 KiB; S = 8192 adds 24
KiB of keys and values and its shares are no larger. PSUM: scores 6 banks, P V 2, whose ends serve
the transposes; 4 and 4 for d = 256. Exact: weights and transposed weights 5 * 2048 b instead, three
constants of 256 bytes, PSUM 6 and 2 banks; its tiles and those of the bounded softmax are not
needed at the same time.

Numerics. Products and sums in fp32; weights are rounded to the dtype of v before P V. ACT is taken
to round scale * score before it adds the shift; where it fuses the two, |scale * score| must stay
below 1e9. Bounded: relative L2 error within 1.15 of an exact maximum with bf16 weights wherever the
check on the row sums passes (bounded.py, share_result.py).
"""

from ..backend import nki, nl
from ..sizes import PARTITIONS
from .cache.transposed_key_writer import key_writer
from .loading import element_bytes
from .prefill.share_loop import ShareLoop
from .tile_schedule import core_shares
from .write_kv_cache_nki import CacheWriter


def chunk_writer(
    chunks: list[nl.NkiTensor],  # k, v, or v alone
    caches: list[nl.NkiTensor],  # k_cache, v_cache, or v_cache alone
    slot_mapping: nl.NkiTensor,
    scales: list[nl.NkiTensor | None],
    core: int,
    num_cores: int,
) -> CacheWriter | None:
    """What a core stores: both caches, or one of two cores one of them; None: nothing.

    Of two cores the second one stores the values.
    """
    if num_cores == 1:
        return CacheWriter(chunks, caches, slot_mapping, scales)
    own = core + len(chunks) - num_cores
    if own < 0:
        return None
    return CacheWriter([chunks[own]], [caches[own]], slot_mapping, [scales[own]])


@nki.jit
def padded_prefill_kernel(
    q: nl.NkiTensor,  # [H, S, d]
    k: nl.NkiTensor,  # [KV, S, d]
    v: nl.NkiTensor,  # [KV, S, d]
    k_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d], changed in place
    v_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d], changed in place
    slot_mapping: nl.NkiTensor,  # [S] int32, -1 from num_tokens on
    num_tokens: nl.NkiTensor,  # [1, 1] int32
    scale: float,
    window: int | None,
    sinks: nl.NkiTensor | None,  # [1, H] fp32
    k_scales: nl.NkiTensor | None,  # [1, KV] fp32
    v_scales: nl.NkiTensor | None,  # [1, KV] fp32
    softmax: str,  # "exact", "bounded", or "auto": bounded, then exact where the check fails
    key_tokens: nl.NkiTensor | None = None,  # plan of key_write_plan.py, with which the K cache
    key_blocks: nl.NkiTensor | None = None,  # is [num_blocks, KV, d, block_size]
    key_rest: nl.NkiTensor | None = None,
    num_key_rest: nl.NkiTensor | None = None,
) -> tuple[nl.NkiTensor, nl.NkiTensor, nl.NkiTensor, nl.NkiTensor]:
    """Attention [H, S, d] of the chunk over itself, the two caches, and the flags [cores, H]."""
    num_q_heads, num_rows, d = q.shape
    num_kv_heads = k.shape[0]
    assert num_rows % PARTITIONS == 0, "the number of rows must be a multiple of 128"
    assert num_q_heads % num_kv_heads == 0, "query heads must be a multiple of KV heads"
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    core = nl.program_id(0)
    num_cores = nl.num_programs(0)
    parts, caches, scales = [k, v], [k_cache, v_cache], [k_scales, v_scales]
    if key_tokens is not None:
        parts, caches, scales = [v], [v_cache], [v_scales]
    writer = chunk_writer(parts, caches, slot_mapping, scales, core, num_cores)
    loop = ShareLoop(q, k, v, out, num_tokens, scale, window, sinks, softmax)
    shares = core_shares(
        num_q_heads, num_q_heads // num_kv_heads, num_rows // PARTITIONS, d,
        element_bytes(q.dtype), core, num_cores,
    )  # fmt: skip
    loop.run(shares, None, writer)
    if writer is not None:
        writer.prepare()
        writer.finish()
    keys = None
    if core == 0:
        keys = key_writer(k, k_cache, k_scales, key_tokens, key_blocks, key_rest, num_key_rest)
    if keys is not None:
        keys.write()
    return out, k_cache, v_cache, loop.store_flags(core, num_cores)


@nki.jit
def chunk_attention_kernel(
    q: nl.NkiTensor,  # [H, S, d]
    k: nl.NkiTensor,  # [KV, S, d]
    v: nl.NkiTensor,  # [KV, S, d]
    num_tokens: nl.NkiTensor,  # [1, 1] int32
    scale: float,
    window: int | None,
    sinks: nl.NkiTensor | None,  # [1, H] fp32
    softmax: str,
) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """The attention of padded_prefill_kernel without its cache write, and the flags [cores, H]."""
    num_q_heads, num_rows, d = q.shape
    assert num_rows % PARTITIONS == 0, "the number of rows must be a multiple of 128"
    assert num_q_heads % k.shape[0] == 0, "query heads must be a multiple of KV heads"
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    core = nl.program_id(0)
    num_cores = nl.num_programs(0)
    loop = ShareLoop(q, k, v, out, num_tokens, scale, window, sinks, softmax)
    shares = core_shares(
        num_q_heads, num_q_heads // k.shape[0], num_rows // PARTITIONS, d, element_bytes(q.dtype),
        core, num_cores,
    )  # fmt: skip
    loop.run(shares, None, None)
    return out, loop.store_flags(core, num_cores)
