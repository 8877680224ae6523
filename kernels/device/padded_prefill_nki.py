"""padded_prefill: causal attention of a chunk without prior, fused with its cache write.

Formula. For query head h, row i < num_tokens, KV head g = h // (H / KV):
    out[h, i] = softmax over max(0, i - sliding_window + 1) <= j <= i of scale * q[h, i] . k[g, j],
                times v[g, j]
or, not causal, over all j < num_tokens,
where sinks[h] joins the sum of the softmax as one more logit without a value. Rows >= num_tokens
are zero. k and v are stored through slot_mapping as in write_kv_cache.

Supported range and errors. S a multiple of 128 up to 8192, S * head_dim * element size up to 4 MiB
(S = 8192 with 128 fp32 features), head_dim up to 256, H a multiple of KV, bf16, fp16 or fp32, one
or two cores. softmax="bounded": bf16 or fp32, half that size. Rows >= num_tokens of q, k, v may
hold NaN or infinity.
`segattn.kernels.padded_prefill` raises ValueError for anything else; the kernels only assert
shapes. A failed check of the bounded softmax shows in the flags.

Loop nest, of pieces in prefill/. Pass of the core, of q_groups (heads of a KV head and rows of
them, 8192 rows in bf16 at most; those after the first rows of their heads are left out at run time
when they are padding):
    bounded (bounded_softmax.py): q_block of 4 q_tiles, the first rows first -> kv_tile: scores, one
        exp, and P V of the kv_tile some before; beside: columns of the next q_block, the results of
        those before, the cache write
    exact (online_softmax.py): q_tile -> iteration of at most 16 kv_tiles up to the diagonal: scores
        and row_max, weights of the iteration two before transposed, P V of the one three before
kv_tiles that a window hides are left out in both, those that it cuts are masked (band.py).

Layouts. Query and key columns [128 features, rows] per 128 features of d, a tensor for each q_block
and for each 4 kv_tiles; values with a column of ones [128, 4 * (d + 1)]: row t * 128 + p on
partition p. q_tile i * heads + h of a q_group is row tile i of head h. Bounded: scores [128 keys,
512 queries]. Exact: scores [128 queries, keys] in PSUM, weights transposed by PE. A pre-transposed
K cache is written by cache_writer.py as well.

On-chip memory per partition, element size b, tiles n = S / 128, row tiles m of a q_group of G
heads, f = ceil(d / 128): query columns 128 f G m b, accumulators 4 G m (d + 1), keys and values of
the chunk n (128 f + d + 1) b and rows of some q_blocks ahead, weights 9 * 512 b; G m f b <= 128.
S = 2048, G = 4, d = 128, bf16: 16 + 33 + 8 + 9 KiB and 10 of rows; S = 8192 adds 24 KiB. PSUM, a
bank for each tile: P V of four q_tiles, scores and transposes in the others; exact: four banks of
scores, transposes and sums in the others, and 25 weight tiles of 512 b.

Numerics. Products and sums in fp32; weights are rounded to the dtype of v before P V. ACT is taken
to round scale * score before it adds the shift; where it fuses the two, |scale * score| must stay
below 1e9. Bounded: relative L2 error within 1.15 of an exact maximum with bf16 weights wherever the
check on the row_sums passes (bounded_softmax.py, result.py), over some 256 rows of heads.
"""

from collections.abc import Iterator

from ..backend import nki, nl
from ..sizes import SoftmaxArguments
from .cache_writer import Source
from .prefill.attend import ChunkArguments, Prefill, new_lse

IDLE_ROWS = 64
"""A cache write waits one portion for each so many rows of the chunk, whose loads come first."""


def stores(source: Source) -> Iterator[None]:
    """A cache write beside the attention of its chunk."""
    for _ in range(source.chunk.shape[1] // IDLE_ROWS):
        yield
    yield from source.work()


@nki.jit
def padded_prefill_kernel(
    q: nl.NkiTensor,  # [H, S, d]
    k: nl.NkiTensor,  # [KV, S, d]
    v: nl.NkiTensor,  # [KV, S, d]
    k_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d], changed in place
    v_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d], changed in place
    writes: nl.NkiTensor,  # plan.cache_writes.CacheWrites of the values, and of keys in rows
    run: int,
    num_tokens: nl.NkiTensor,  # [1, 1] int32
    softmax: SoftmaxArguments,
    sinks: nl.NkiTensor | None = None,  # [1, H] fp32
    k_scales: nl.NkiTensor | None = None,  # [1, KV] fp32
    v_scales: nl.NkiTensor | None = None,  # [1, KV] fp32
    key_writes: nl.NkiTensor | None = None,  # of the keys, when the K cache is pre-transposed,
    key_run: int = 0,  # [num_blocks, KV, d, block_size]
) -> tuple[nl.NkiTensor, ...]:
    """Attention [H, S, d] of the chunk over itself, caches, flags [cores, H], lse [H, S]."""
    softmax = SoftmaxArguments.of(softmax)
    out = nl.ndarray((*q.shape[:2], v.shape[2]), dtype=q.dtype, buffer=nl.shared_hbm)
    keys = Source(k, k_cache, k_scales, writes, run)
    if key_writes is not None:
        keys = Source(k, k_cache, k_scales, key_writes, key_run, pre_transposed=True)
    sources = [keys, Source(v, v_cache, v_scales, writes, run)]
    if nl.num_programs(0) == 2:
        sources = [sources[nl.program_id(0)]]
    writes_left = [stores(source) for source in sources]
    prefill = Prefill(
        ChunkArguments(q, (k, v), num_tokens, sinks, out, new_lse(q, softmax.with_lse)),
        softmax,
        None,
    )  # fmt: skip
    prefill.run(writes_left)
    for each in writes_left:
        for _ in each:
            pass
    return (out, k_cache, v_cache, *prefill.results())


@nki.jit
def chunk_attention_kernel(
    q: nl.NkiTensor,  # [H, S, d]
    k: nl.NkiTensor,  # [KV, S, d]
    v: nl.NkiTensor,  # [KV, S, d]
    num_tokens: nl.NkiTensor,  # [1, 1] int32
    softmax: SoftmaxArguments,
    sinks: nl.NkiTensor | None = None,  # [1, H] fp32
) -> tuple[nl.NkiTensor, ...]:
    """padded_prefill_kernel without its cache write and the caches."""
    softmax = SoftmaxArguments.of(softmax)
    out = nl.ndarray((*q.shape[:2], v.shape[2]), dtype=q.dtype, buffer=nl.shared_hbm)
    prefill = Prefill(
        ChunkArguments(q, (k, v), num_tokens, sinks, out, new_lse(q, softmax.with_lse)),
        softmax,
        None,
    )  # fmt: skip
    prefill.run([])
    return (out, *prefill.results())
