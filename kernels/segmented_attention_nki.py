"""segmented_attention: causal attention of a chunk over its paged prior and itself.

Formula. Row i < num_tokens stands at position p = prior_tokens + i. For query head h on KV head g:
    out[h, i] = softmax over the keys at positions max(0, p - sliding_window + 1) .. p of
                scale * q[h, i] . key[g, j], times value[g, j]
where sinks[h] joins the sum of the softmax as one more logit without a value. Keys and values at
positions < prior_tokens come from the cache through block_table (-1: absent) as stored value times
k_scale[g] or v_scale[g], the others from k and v. Rows >= num_tokens are zero.

Supported range. S a multiple of 128, head_dim up to 256, H a multiple of KV, block_size a power of
two, any prior_tokens that the table covers, kv_segment_size a multiple of 128 and of block_size;
bf16, fp16 or fp32, caches the same or fp8 with scales; one or two cores. block_table is padded
with -1 to whole segments and three more. Unused cache rows and padded rows may hold NaN or
infinity.
`segattn.kernels.segmented_attention` checks arguments; the kernel only asserts shapes.

Loop nest. Share of the core (consecutive query heads of a KV head): the chunk over itself as in
padded_prefill, then
    bounded (prior_stream.py): pairs of whole segments (runtime count), an odd one, then the rest in
        segments of 512 -> block of 4 row tiles -> macro of 2 key tiles; the next segment is
        prepared beside
    exact (exact_rows.py): the same segments -> row tile -> step of at most 2048 keys
    exact with a window or head_dim > 128: segment (runtime bounds: the window's first to the last)
        -> row tile -> query head -> step of at most 2048 keys
A long chunk's last blocks are computed over the chunk after the prior, beside the results of the
others.

Layouts. With r = kv_segment_size / 128, token p * r + j of a segment lies on partition p, so that
a partition is filled by long runs of the cache; key tile j is the tokens j, r + j, 2 r + j, ...
Key columns [128 features, segment]: column j * 128 + p. Masks are made in token order and read
with stride r. With k_pre_transposed, keys are staged in columns [features, segment] of token order
(transposed_keys.py), from which a strided copy makes key columns instead of PE.

On-chip memory per partition: that of padded_prefill, plus for a segment of s tokens, element size
b: staged and zeroed rows 4 r d b, key columns s b, mask and positions 9 s. s = 2048, d = 128,
bf16: 16 + 4 + 18 = 38 KiB. Bounded: two sets of staged rows 2 r d b, key columns s b and values
r (d + 1) b: 2 (8 + 4 + 4) = 32 KiB, for the tail a quarter of that and once more zeroed keys, key
columns and values of 512 tokens: 4 + 3 KiB. With more than 4 blocks its segments are half as long;
the exact softmax takes whole ones, with a mask row of 2 s bytes each.

Numerics. As padded_prefill; the running maximum is exact, so a later segment rescales the earlier
ones by exp(old - new) <= 1. k_scale joins the softmax scale in fp32, v_scale the accumulator.
"""

from typing import Any

from .attend import ExactShare
from .attend_bounded import (
    attend_first_blocks,
    attend_last_blocks,
    blocks_before_prior,
    new_flags,
    scale_values_bounded,
    share_sinks,
    share_valid,
    store_flags,
    write_flag,
)
from .backend import nisa, nki, nl
from .bounded import BoundedRows, num_blocks_of
from .bounded_result import BoundedResult
from .chunk_stream import ChunkKeys, ChunkStream
from .exact_rows import ExactRows
from .loading import RowTiles, broadcast_row, element_bytes
from .masks import from_position, share_rows, valid_rows
from .paged_cache import PagedSegments
from .prior_stream import TAIL_SEGMENT, PriorStream, whole_segment_size
from .share_padding import Condition, ZeroRows, as_flag, real_rows
from .softmax import ScoreScale, SoftmaxState, cached_scale, next_step, score_tile
from .tile_schedule import MACRO_TILES, PARTITIONS, Share, core_shares


def attend_prior(
    prior: PagedSegments,
    prior_count: nl.NkiTensor,  # [128, 1] fp32
    end: nisa.VirtualRegister,  # prior_tokens
    kv_head: int,
    share: Share,
    queries: list[nl.NkiTensor],  # per 128 features: [<= 128, heads * tiles * 128]
    window: int | None,
    scale: ScoreScale,
    state: SoftmaxState,
) -> None:
    """Continue the softmax of a share's row tiles with the cached tokens."""
    d, tokens = prior.d, prior.tokens
    tiles = len(share.row_tiles)
    counts = nl.ndarray((PARTITIONS, 2), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=counts, src=prior_count.ap([[1, PARTITIONS], [0, 2]]))
    oldest = None
    row = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    if window is not None:
        oldest = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=oldest, data=prior_count, op0=nl.subtract, operand0=float(window - 1)
        )
        nisa.iota(row, [[1, 1]], offset=0, channel_multiplier=1)
    walk = prior.walk(counts, oldest, prior.segment_size)

    def segment(i: nisa.VirtualRegister) -> None:
        keys, value_rows, seen = prior.load(0, walk, kv_head, PARTITIONS)
        for tile in range(tiles):
            mask = seen
            if window is not None:
                # Row p of the tile sees from position prior + tile * 128 + p - window + 1 on.
                near = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
                nisa.tensor_scalar(
                    dst=near, data=row, op0=nl.add,
                    operand0=float(share.row_tiles[tile] * PARTITIONS - window + 1),
                    op1=nl.add, operand1=walk.counts[:, 1:2],
                )  # fmt: skip
                mask = from_position(prior.positions, near, seen)
            for head in range(share.num_heads):
                t = tile * share.num_heads + head
                for first in range(0, tokens, MACRO_TILES):
                    count = min(MACRO_TILES, tokens - first)
                    scores = score_tile(
                        queries, t * PARTITIONS, PARTITIONS,
                        keys, first * PARTITIONS, count * PARTITIONS,
                    )  # fmt: skip
                    next_step(
                        scores,
                        prior.mask_columns(mask, first, count),
                        RowTiles(value_rows, d, d, first * d),
                        scale,
                        state,
                        t,
                    )
        prior.advance(walk)

    nl.fori_loop(walk.start, end, segment, step=prior.segment_size)


def attend_share(
    rows: BoundedRows | ExactRows,
    prior: PriorStream,
    q: nl.NkiTensor,  # [H, S, d] HBM
    keys: ChunkKeys,
    own_valid: nl.NkiTensor,  # [128, row tiles of the share] uint8
    value_scale: nl.NkiTensor | None,  # [128, 1] fp32
    sinks: nl.NkiTensor | None,  # [128, tiles] fp32
    prior_scale: ScoreScale,
    condition: Condition,
    out: nl.NkiTensor,  # [H, S, d] HBM, result
    beside: list[Any],  # work that the share's macros leave time for
) -> BoundedResult:
    """A share, if the condition holds: first blocks of the chunk, prior, last blocks."""
    share = rows.share
    tile_valid = nl.ndarray((PARTITIONS, rows.num_tiles), dtype=nl.uint8, buffer=nl.sbuf)
    chunk = ChunkStream(rows, q, keys, tile_valid)
    num_first = rows.num_blocks
    if value_scale is None:
        num_first = blocks_before_prior(rows)
    result = BoundedResult(rows, out, tile_valid, sinks, value_scale)

    def first(i: nisa.VirtualRegister | int) -> None:
        chunk.begin()
        prior.begin()
        share_valid(own_valid, share, tile_valid)
        attend_first_blocks(rows, chunk, num_first, prior, None, beside)
        if value_scale is not None:
            scale_values_bounded(rows, value_scale)

    def last(i: nisa.VirtualRegister | int) -> None:
        attend_last_blocks(rows, chunk, num_first, result)

    condition.run(first)
    prior.attend(prior_scale)
    condition.run(last)
    return result


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
) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Attention [H, S, d] of the chunk over its prior and itself, and the flags [cores, H]."""
    num_q_heads, num_rows, d = q.shape
    num_kv_heads = k.shape[0]
    assert num_rows % PARTITIONS == 0, "the number of rows must be a multiple of 128"
    assert num_q_heads % num_kv_heads == 0, "query heads must be a multiple of KV heads"
    assert kv_segment_size % PARTITIONS == 0, "kv_segment_size must be a multiple of 128"
    assert kv_segment_size % v_cache.shape[2] == 0, "kv_segment_size must be whole blocks"
    num_tiles = num_rows // PARTITIONS
    group = num_q_heads // num_kv_heads
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    core = nl.program_id(0)
    num_cores = nl.num_programs(0)
    real = broadcast_row(num_tokens)
    prior_count = broadcast_row(prior_tokens)
    every_sink = None
    if sinks is not None:
        every_sink = broadcast_row(sinks)
    shares = core_shares(num_q_heads, group, num_tiles, element_bytes(q.dtype), core, num_cores)
    whole = None
    longest = 0
    for share in shares:
        longest = max(longest, num_blocks_of(share))
    size = whole_segment_size(kv_segment_size, v_cache.shape[2], longest)
    streamed = window is None and d <= PARTITIONS
    if streamed and kv_segment_size > TAIL_SEGMENT:
        whole = PagedSegments(k_cache, v_cache, block_table, size, 1, q.dtype, k_pre_transposed)
    tail_size = min(TAIL_SEGMENT, kv_segment_size)
    tail = PagedSegments(k_cache, v_cache, block_table, tail_size, 1, q.dtype, k_pre_transposed)
    k_factor = None
    v_factor = None
    if k_scales is not None:
        k_factor = broadcast_row(k_scales)
    if v_scales is not None:
        v_factor = broadcast_row(v_scales)
    flags = new_flags(num_q_heads)
    every_valid = valid_rows(real, num_tiles)
    zeros = ZeroRows(out, shares, 0, group)
    chunks: list[ChunkKeys] = []
    long_segments: list[PagedSegments] = []  # of the exact softmax, whose steps take 2048 keys
    for share in shares:
        kv_head = share.first_head // group
        prior_scale = ScoreScale(scale, -scale)
        if k_factor is not None:
            prior_scale = cached_scale(k_factor[:, kv_head : kv_head + 1], scale)
        value_scale: float | nl.NkiTensor = 1.0
        own_factor = None
        if v_factor is not None:
            own_factor = v_factor[:, kv_head : kv_head + 1]
            value_scale = own_factor
        if zeros.first_head != kv_head * group:
            zeros = ZeroRows(out, shares, kv_head * group, group)
        if streamed and not share.may_be_padding:
            chunks.append(ChunkKeys(k, v, kv_head, every_valid))
        own_valid = share_rows(every_valid, share)
        is_real = Condition(None)
        if share.may_be_padding:
            is_real = Condition(as_flag(real_rows(real, share)))
            zeros.finish()
        beside: list[Any] = []
        if not share.may_be_padding:
            beside.append(zeros)
        own_sinks = share_sinks(every_sink, share)
        fallback = is_real
        if softmax != "exact":
            bounded = BoundedRows(share, d, q.dtype, scale)
            stream = PriorStream(bounded, whole, tail, prior_count, kv_head)
            result = attend_share(
                bounded, stream, q, chunks[len(chunks) - 1], own_valid, own_factor, own_sinks,
                prior_scale, is_real, out, beside,
            )  # fmt: skip
            fallback = Condition(write_flag(result, bounded, flags, share, is_real))
            beside = []
        if softmax != "bounded" and streamed:
            if whole is not None and len(long_segments) == 0:
                long_segments.append(whole)
                if size < kv_segment_size:
                    long_segments[0] = PagedSegments(
                        k_cache, v_cache, block_table, kv_segment_size, 1, q.dtype,
                        k_pre_transposed,
                    )  # fmt: skip
            longest_segment = None
            if len(long_segments) > 0:
                longest_segment = long_segments[0]
            rows = ExactRows(share, d, q.dtype, scale)
            stream = PriorStream(rows, longest_segment, tail, prior_count, kv_head)
            attend_share(
                rows, stream, q, chunks[len(chunks) - 1], own_valid, own_factor, own_sinks,
                prior_scale, fallback, out, beside,
            )  # fmt: skip
        elif softmax != "bounded":
            end_tile = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=end_tile, src=prior_count[0:1, :])
            prior = PagedSegments(
                k_cache, v_cache, block_table, kv_segment_size, 1, q.dtype, k_pre_transposed
            )
            exact = ExactShare(share, d, q.dtype, own_valid, fallback)
            exact.attend_chunk(
                q, k, v, kv_head, every_valid, window, scale, every_sink, own_factor, prior
            )
            attend_prior(
                prior, prior_count, exact.end_of(end_tile), kv_head, share, exact.queries, window,
                prior_scale, exact.state,
            )  # fmt: skip
            exact.store(out, value_scale)
    return out, store_flags(flags, core, num_cores)
