"""paged_decode: attention of the last tokens of each request over its paged context.

Formula. Request b has context_lens[b] tokens in the cache; the last query_lens[b] of them are its
queries. Query t < query_lens[b] stands at position p = context_lens[b] - query_lens[b] + t. For
query head h on KV head g:
    out[b, h, t] = softmax over the positions max(0, p - sliding_window + 1) .. p whose block is
                   mapped of scale * q[b, h, t] . key[g, j], times value[g, j]
where sinks[h] joins the sum of the softmax as one more logit without a value, and keys and values
are the stored ones times k_scale[g], v_scale[g]. Other rows are zero.

Supported range. Any B >= 1, H a multiple of KV, H / KV * T <= 128, head_dim up to 256, block_size
a power of two, segment_size a multiple of 128 and of block_size, at most 2048; bf16, fp16 or fp32,
caches the same or fp8 with scales; one or two cores. block_tables is padded with -1 to whole
segments. Unused cache rows and padded queries may hold NaN or infinity.
`segattn.kernels.paged_decode` checks arguments; the kernel only asserts shapes.

Loop nest. Group of KV heads (their queries: at most 128 rows) -> group of requests -> request
-> segment of its context (runtime bounds) -> 128-key tiles. Two cores take every other request, or
half of the KV heads of a single one. One instruction serves all heads of the group: q is spread
over block-diagonal columns, so that a row of the scores meets only the keys of its own KV head,
and P V is computed against the values of every KV head, of which a row keeps its own block. On the
systolic array neither costs time: rows and 64-wide columns are free.

Layouts, R = rows (head, t) of a request in the group, r = segment_size / 128.
    keys, values  [128 p, (head, j, d)]     token p * r + j of the segment
    key columns   [features <= 128, segment]   column j * 128 + p; several heads when d < 128
    queries       [features <= 128, (request, row)]   zero outside the row's KV head
    scores        [R, segment] PSUM;  acc [R, (request, KV head, d)] fp32

On-chip memory per partition, k KV heads in the group (k * d <= 512), element size b: staged and
zeroed keys and values 4 k r d b, key columns k d segment b / 128, masks 13 segment, acc at most
32 KiB. segment 512, k d = 512, fp32: 32 + 8 + 6.5 + 32 = 79 KiB.

Numerics. As segmented_attention with softmax="exact": exact running maximum, fp32 sums, weights in
the dtype of v.
"""

from dataclasses import dataclass

from .backend import nisa, nki, nl
from .loading import RowTiles, broadcast_row, transpose_row_tiles
from .masks import from_position, own_head_mask
from .paged_cache import PagedSegments
from .softmax import (
    ScoreScale,
    SoftmaxState,
    begin,
    cached_scale,
    new_state,
    next_step,
    normalise,
    score_tile,
)
from .tile_schedule import MACRO_TILES, MATMUL_COLUMNS, PARTITIONS

GROUP_WIDTH = MATMUL_COLUMNS
"""Most columns (KV heads * d) of one group: P V of a matmul fills one PSUM bank."""

STATE_COLUMNS = 8192
"""Most fp32 columns of acc for a group of requests: 32 KiB."""


@dataclass
class FeatureChunk(nl.NKIObject):
    """At most 128 features that one matmul contracts: whole heads, or a part of one head."""

    head: int
    num_heads: int
    feature: int
    width: int  # features per head


def feature_chunks(num_heads: int, d: int) -> list[FeatureChunk]:
    """The chunks of a group of KV heads."""
    chunks: list[FeatureChunk] = []
    heads_per_chunk = max(1, PARTITIONS // d)
    for head in range(0, num_heads, heads_per_chunk):
        for feature in range(0, d, PARTITIONS):
            heads = min(heads_per_chunk, num_heads - head)
            chunks.append(FeatureChunk(head, heads, feature, min(PARTITIONS, d - feature)))
    return chunks


def kv_heads_per_group(num_kv_heads: int, rows_per_kv_head: int, d: int) -> int:
    """KV heads that one group of instructions serves: a divisor of num_kv_heads."""
    fitting = min([num_kv_heads, PARTITIONS // rows_per_kv_head, GROUP_WIDTH // d])
    while num_kv_heads % fitting != 0:
        fitting = fitting - 1
    return fitting


def spread_queries(
    q: nl.NkiTensor,  # [B, H, T, d] HBM
    requests: list[int],
    first_row: int,  # row of a request, (query head, t), that the KV head group starts at
    rows: int,  # rows of a request in the group
    rows_per_kv_head: int,
    chunks: list[FeatureChunk],
) -> list[nl.NkiTensor]:
    """Per chunk: [features, requests * rows], zero outside a row's own KV head."""
    _, num_q_heads, num_queries, d = q.shape
    request_rows = num_q_heads * num_queries
    num_requests = len(requests)
    columns = num_requests * rows
    per_load = PARTITIONS // rows
    parts: list[nl.NkiTensor] = []
    for feature in range(0, d, PARTITIONS):
        width = min(PARTITIONS, d - feature)
        parts.append(nl.ndarray((width, columns), dtype=q.dtype, buffer=nl.sbuf))
    for first in range(0, num_requests, per_load):
        count = min(per_load, num_requests - first)
        loaded = nl.ndarray((count * rows, d), dtype=q.dtype, buffer=nl.sbuf)
        step = 1
        if num_requests > 1:
            step = requests[1] - requests[0]
        nisa.dma_copy(
            dst=loaded,
            src=q.ap(
                [[step * request_rows * d, count], [1, rows * d]],
                offset=(requests[first] * request_rows + first_row) * d,
            ),
        )
        for part in range(len(parts)):
            columns_of_part = parts[part]
            width = columns_of_part.shape[0]
            bank = nl.ndarray((width, count * rows), dtype=q.dtype, buffer=nl.psum)
            nisa.nc_transpose(
                dst=bank,
                data=loaded[:, part * PARTITIONS : part * PARTITIONS + width],
                engine=nisa.engine.tensor,
            )
            nisa.tensor_copy(
                dst=columns_of_part[:, first * rows : (first + count) * rows], src=bank
            )
    spread: list[nl.NkiTensor] = []
    for chunk in chunks:
        width = chunk.width
        tile = nl.ndarray((chunk.num_heads * width, columns), dtype=q.dtype, buffer=nl.sbuf)
        nisa.memset(dst=tile, value=0.0)
        source = parts[chunk.feature // PARTITIONS]
        for head in range(chunk.num_heads):
            own = (chunk.head + head) * rows_per_kv_head
            pattern = [[columns, width], [rows, num_requests], [1, rows_per_kv_head]]
            nisa.tensor_copy(
                dst=tile.ap(pattern, offset=head * width * columns + own),
                src=source.ap(pattern, offset=own),
            )
        spread.append(tile)
    return spread


def visible_counts(
    context_lens: nl.NkiTensor,  # [1, B] int32 HBM
    query_lens: nl.NkiTensor,  # [1, B] int32 HBM
    num_queries: int,
) -> nl.NkiTensor:
    """[128, (B, 2)] fp32: a request's tokens, and how many row p = (head, t) sees, t = p % T."""
    lengths = broadcast_row(context_lens)
    queries = broadcast_row(query_lens)
    num_requests = lengths.shape[1]
    shape = (PARTITIONS, num_requests)
    # t = p - T * floor(p / T); the cast to int32 rounds to nearest.
    row = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(row, [[1, 1]], offset=0, channel_multiplier=1)
    head = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=head, data=row, op0=nl.multiply, operand0=1.0 / num_queries, op1=nl.subtract,
        operand1=0.5 - 0.5 / num_queries,
    )  # fmt: skip
    t = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=t, data=head, op0=nl.multiply, operand0=-float(num_queries), op1=nl.add, operand1=row
    )
    real = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=real, data=queries, op0=nl.greater, operand0=t)
    before = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=before, data1=lengths, data2=queries, op=nl.subtract)
    nisa.tensor_scalar(dst=before, data=before, op0=nl.add, operand0=t, op1=nl.add, operand1=1.0)
    counts = nl.ndarray((PARTITIONS, num_requests * 2), dtype=nl.float32, buffer=nl.sbuf)
    even = [[num_requests * 2, PARTITIONS], [2, num_requests]]
    nisa.tensor_copy(dst=counts.ap(even), src=lengths)
    nisa.tensor_tensor(dst=counts.ap(even, offset=1), data1=before, data2=real, op=nl.multiply)
    return counts


def oldest_positions(
    context_lens: nl.NkiTensor,  # [1, B] int32 HBM
    query_lens: nl.NkiTensor,  # [1, B] int32 HBM
    window: int,
) -> nl.NkiTensor:
    """[128, B] fp32: the first position that a request's first query sees; may be negative."""
    oldest = broadcast_row(context_lens)
    queries = broadcast_row(query_lens)
    nisa.tensor_tensor(dst=oldest, data1=oldest, data2=queries, op=nl.subtract)
    nisa.tensor_scalar(dst=oldest, data=oldest, op0=nl.subtract, operand0=float(window - 1))
    return oldest


def attend_request(
    context: PagedSegments,
    request: int,
    end: nisa.VirtualRegister,  # tokens of the request
    counts: nl.NkiTensor,  # [128, 2] fp32 from visible_counts, consumed
    oldest: nl.NkiTensor | None,  # [128, 1] fp32: first position that any row sees
    first_head: int,
    queries: list[nl.NkiTensor],  # per chunk: [features, requests * rows]
    chunks: list[FeatureChunk],
    window: int | None,
    scale: ScoreScale,
    state: SoftmaxState,
    t: int,  # the request's tile of the state and of the queries
) -> None:
    """Softmax of one request's rows over its context, segment by segment."""
    d, tokens = context.d, context.tokens
    rows = state.row_sum.shape[0]
    walk = context.walk(counts, oldest, context.segment_size)

    def segment(i: nisa.VirtualRegister) -> None:
        key_rows, value_rows, seen = context.load(request, walk, first_head, rows)
        if window is not None:
            near = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(
                dst=near, data=walk.counts[0:rows, 1:2], op0=nl.subtract, operand0=float(window)
            )
            seen = from_position(context.positions[0:rows, :], near, seen)
        keys: list[nl.NkiTensor] = []
        for chunk in chunks:
            first = chunk.head * tokens * d + chunk.feature
            shape = (chunk.num_heads * chunk.width, context.segment_size)
            columns = nl.ndarray(shape, dtype=context.dtype, buffer=nl.sbuf)
            tiles = RowTiles(key_rows, d, chunk.width, first, chunk.num_heads, tokens * d)
            transpose_row_tiles(tiles, tokens, columns)
            keys.append(columns)
        scores = score_tile(queries, t * rows, rows, keys, 0, context.segment_size)
        values = RowTiles(value_rows, d, d, 0, context.num_heads, tokens * d)
        next_step(scores, context.mask_columns(seen, 0, tokens), values, scale, state, t)
        context.advance(walk)

    nl.fori_loop(walk.start, end, segment, step=context.segment_size)


def store_requests(
    out: nl.NkiTensor,  # [B, H, T, d] HBM
    requests: list[int],
    first_row: int,
    own_head: nl.NkiTensor,  # [rows, KV heads] uint8
    state: SoftmaxState,
    value_scale: float | nl.NkiTensor,  # number or [rows, 1]
) -> None:
    """Keep each row's own KV head of the accumulators, normalise, store."""
    _, num_q_heads, num_queries, d = out.shape
    rows, num_requests = state.row_sum.shape
    num_heads = own_head.shape[1]
    request_rows = num_q_heads * num_queries
    own = nl.ndarray((rows, num_requests * d), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=own, value=0.0)
    for head in range(num_heads):
        nisa.tensor_copy_predicated(
            dst=own,
            src=state.acc.ap(
                [[num_requests * num_heads * d, rows], [num_heads * d, num_requests], [1, d]],
                offset=head * d,
            ),
            predicate=own_head.ap([[num_heads, rows], [0, num_requests], [0, d]], offset=head),
        )
    normalise(own, state.row_sum, value_scale)
    result = nl.ndarray((rows, num_requests * d), dtype=out.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=own)
    step = 1
    if num_requests > 1:
        step = requests[1] - requests[0]
    nisa.dma_copy(
        dst=out.ap(
            [[d, rows], [step * request_rows * d, num_requests], [1, d]],
            offset=(requests[0] * request_rows + first_row) * d,
        ),
        src=result,
    )


def per_row(
    numbers: nl.NkiTensor,  # [1, n] fp32 HBM
    first: int,
    count: int,
    repeat: int,
) -> nl.NkiTensor:
    """[count * repeat, 1]: number first + r // repeat on partition r."""
    tile = nl.ndarray((count * repeat, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=numbers.ap([[1, count], [0, repeat]], offset=first))
    return tile


@nki.jit
def paged_decode_kernel(
    q: nl.NkiTensor,  # [B, H, T, d]
    k_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d]
    v_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d]
    block_tables: nl.NkiTensor,  # [B, segments * segment_size / block_size] int32
    context_lens: nl.NkiTensor,  # [1, B] int32
    query_lens: nl.NkiTensor,  # [1, B] int32
    segment_size: int,
    scale: float,
    window: int | None,
    sinks: nl.NkiTensor | None,  # [1, H] fp32
    k_scales: nl.NkiTensor | None,  # [1, KV] fp32
    v_scales: nl.NkiTensor | None,  # [1, KV] fp32
) -> nl.NkiTensor:
    """Attention [B, H, T, d] of each request's last tokens over its context."""
    num_requests, num_q_heads, num_queries, d = q.shape
    num_kv_heads = k_cache.shape[1]
    assert num_q_heads % num_kv_heads == 0, "query heads must be a multiple of KV heads"
    assert segment_size % PARTITIONS == 0, "segment_size must be a multiple of 128"
    assert segment_size % k_cache.shape[2] == 0, "segment_size must be whole blocks"
    assert segment_size <= MACRO_TILES * PARTITIONS, "a segment's scores must fit four PSUM banks"
    group = num_q_heads // num_kv_heads
    rows_per_kv_head = group * num_queries
    assert rows_per_kv_head <= PARTITIONS, "the queries of a KV head must fit 128 partitions"
    core = nl.program_id(0)
    num_cores = nl.num_programs(0)
    num_heads = kv_heads_per_group(num_kv_heads, rows_per_kv_head, d)
    first_request = core
    request_step = num_cores
    core_heads = num_kv_heads
    if num_cores == 2 and num_requests == 1 and num_kv_heads % 2 == 0:
        num_heads = kv_heads_per_group(num_kv_heads // 2, rows_per_kv_head, d)
        core_heads = num_kv_heads // 2
        first_request = 0
        request_step = 1
    first_kv_head = 0
    if core_heads < num_kv_heads:
        first_kv_head = core * core_heads
    rows = num_heads * rows_per_kv_head
    chunks = feature_chunks(num_heads, d)
    per_group = max(1, STATE_COLUMNS // (num_heads * d))

    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    lengths = nl.ndarray((1, num_requests), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=lengths, src=context_lens)
    context = PagedSegments(k_cache, v_cache, block_tables, segment_size, num_heads, q.dtype)
    context.clear_staging()
    context.write_positions()
    own_head = own_head_mask(num_heads, rows_per_kv_head)
    for first_head in range(first_kv_head, first_kv_head + core_heads, num_heads):
        first_row = first_head * rows_per_kv_head
        score_scale = ScoreScale(scale, -scale)
        if k_scales is not None:
            k_factor = per_row(k_scales, first_head, num_heads, rows_per_kv_head)
            score_scale = cached_scale(k_factor, scale)
        value_scale: float | nl.NkiTensor = 1.0
        if v_scales is not None:
            value_scale = per_row(v_scales, first_head, num_heads, rows_per_kv_head)
        counts = visible_counts(context_lens, query_lens, num_queries)
        oldest = None
        if window is not None:
            oldest = oldest_positions(context_lens, query_lens, window)
        for first in range(first_request, num_requests, request_step * per_group):
            requests: list[int] = []
            end = min(num_requests, first + request_step * per_group)
            for request in range(first, end, request_step):
                requests.append(request)
            queries = spread_queries(q, requests, first_row, rows, rows_per_kv_head, chunks)
            state = new_state(rows, len(requests), num_heads * d)
            row_sinks = None
            if sinks is not None:
                sink = per_row(sinks, first_head * group, num_heads * group, num_queries)
                row_sinks = sink.ap([[1, rows], [0, len(requests)]])
            begin(state, scale, row_sinks)
            for t in range(len(requests)):
                request = requests[t]
                length = nisa.register_alloc()
                nisa.register_load(length, lengths[:, request : request + 1])
                own_oldest = None
                if oldest is not None:
                    own_oldest = oldest[:, request : request + 1]
                attend_request(
                    context,
                    request,
                    length,
                    counts[:, 2 * request : 2 * request + 2],
                    own_oldest,
                    first_head,
                    queries,
                    chunks,
                    window,
                    score_scale,
                    state,
                    t,
                )
            store_requests(out, requests, first_row, own_head, state, value_scale)
    return out
