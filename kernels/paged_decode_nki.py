"""paged_decode: attention of the newest token of each request over its paged context.

Formula. Request b has context_lens[b] tokens in the cache, the newest its query. For query head h
on KV head g:
    out[b, h] = softmax over the positions j < context_lens[b] whose block is mapped of
                scale * q[b, h] . key[g, j], times value[g, j]
A request without tokens gets zeros.

Supported range. Any B >= 1, H a multiple of KV, H / KV <= 128, head_dim up to 128, block_size a
power of two, segment a multiple of 128 and of block_size; bf16, fp16 or fp32, one dtype
throughout. block_tables is padded with -1 to whole segments. Unused cache rows and the queries of
requests without tokens may hold NaN or infinity. `segattn.kernels.paged_decode` checks arguments;
the kernel only asserts shapes.

Loop nest. Group of KV heads (their query heads, at most 128 rows) -> group of requests -> request
-> segment of its context (runtime count) -> 128-key tiles. One instruction serves all heads of the
group: q is spread over block-diagonal columns, so that row (h) of the scores meets only the keys
of its own KV head, and P V is computed against the values of every KV head, of which a row keeps
its own block. On the systolic array neither costs time: rows and 64-wide columns are free.

Layouts, R = rows of a request in the group, r = segment / 128.
    keys, values  [128 p, (head, j, d)]     token p * r + j of the segment
    k_t           [heads * d <= 128, segment]   column j * 128 + p
    q_spread      [heads * d <= 128, (request, row)]   zero outside the row's KV head
    scores        [R, segment] PSUM;  acc [R, (request, KV head, d)] fp32

On-chip memory per partition, k KV heads in the group (k * d <= 512), element size b: staged and
zeroed keys and values 4 k r d b, k_t k d segment b / 128, masks 9 segment, acc at most 32 KiB.
segment 512, k d = 512, fp32: 32 + 8 + 4.5 + 32 = 77 KiB.

Numerics. As segmented_attention: exact running maximum, fp32 sums, weights in the dtype of v.
"""

from .backend import nisa, nki, nl
from .loading import RowTiles, transpose_row_tiles
from .masks import own_head_mask
from .paged_cache import PagedSegments
from .softmax import FLOOR, next_step, normalise
from .tile_schedule import MACRO_TILES, MATMUL_COLUMNS, PARTITIONS

GROUP_WIDTH = 512
"""Most columns (KV heads * d) of one group: P V of a matmul fills one PSUM bank."""

STATE_COLUMNS = 8192
"""Most fp32 columns of acc for a group of requests: 32 KiB."""


def kv_heads_per_group(num_kv_heads: int, rows_per_kv_head: int, d: int) -> int:
    """KV heads that one group of instructions serves: a divisor of num_kv_heads."""
    fitting = min([num_kv_heads, PARTITIONS // rows_per_kv_head, GROUP_WIDTH // d])
    while num_kv_heads % fitting != 0:
        fitting = fitting - 1
    return fitting


def spread_queries(
    q: nl.NkiTensor,  # [B, H, T, d] HBM
    first_request: int,
    num_requests: int,
    first_row: int,  # row of a request, (query head, t), that the KV head group starts at
    rows: int,  # rows of a request in the group
    rows_per_kv_head: int,
    heads_per_tile: int,
) -> list[nl.NkiTensor]:
    """Per tile of KV heads: [heads * d, requests * rows], zero outside a row's own KV head."""
    _, num_q_heads, num_queries, d = q.shape
    request_rows = num_q_heads * num_queries
    columns = num_requests * rows
    q_t = nl.ndarray((d, columns), dtype=q.dtype, buffer=nl.sbuf)
    per_load = max(1, PARTITIONS // rows)
    for first in range(0, num_requests, per_load):
        count = min(per_load, num_requests - first)
        loaded = nl.ndarray((count * rows, d), dtype=q.dtype, buffer=nl.sbuf)
        nisa.dma_copy(
            dst=loaded,
            src=q.ap(
                [[request_rows * d, count], [1, rows * d]],
                offset=((first_request + first) * request_rows + first_row) * d,
            ),
        )
        bank = nl.ndarray((d, count * rows), dtype=q.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=loaded, engine=nisa.engine.tensor)
        nisa.tensor_copy(dst=q_t[:, first * rows : (first + count) * rows], src=bank)
    spread: list[nl.NkiTensor] = []
    num_kv_heads = rows // rows_per_kv_head
    for first_head in range(0, num_kv_heads, heads_per_tile):
        heads = min(heads_per_tile, num_kv_heads - first_head)
        tile = nl.ndarray((heads * d, columns), dtype=q.dtype, buffer=nl.sbuf)
        nisa.memset(dst=tile, value=0.0)
        for head in range(heads):
            own = (first_head + head) * rows_per_kv_head
            nisa.tensor_copy(
                dst=tile.ap(
                    [[columns, d], [rows, num_requests], [1, rows_per_kv_head]],
                    offset=head * d * columns + own,
                ),
                src=q_t.ap([[columns, d], [rows, num_requests], [1, rows_per_kv_head]], offset=own),
            )
        spread.append(tile)
    return spread


def store_requests(
    out: nl.NkiTensor,  # [B, H, T, d] HBM
    first_request: int,
    first_row: int,
    own_head: nl.NkiTensor,  # [rows, KV heads] uint8
    row_sum: nl.NkiTensor,  # [rows, requests]
    acc: nl.NkiTensor,  # [rows, requests * KV heads * d]
) -> None:
    """Keep each row's own KV head of acc, normalise, store."""
    _, num_q_heads, num_queries, d = out.shape
    rows, num_requests = row_sum.shape
    num_heads = own_head.shape[1]
    request_rows = num_q_heads * num_queries
    own = nl.ndarray((rows, num_requests * d), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=own, value=0.0)
    for head in range(num_heads):
        nisa.tensor_copy_predicated(
            dst=own,
            src=acc.ap(
                [[num_requests * num_heads * d, rows], [num_heads * d, num_requests], [1, d]],
                offset=head * d,
            ),
            predicate=own_head.ap([[num_heads, rows], [0, num_requests], [0, d]], offset=head),
        )
    normalise(row_sum, own, d)
    result = nl.ndarray((rows, num_requests * d), dtype=out.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=own)
    nisa.dma_copy(
        dst=out.ap(
            [[d, rows], [request_rows * d, num_requests], [1, d]],
            offset=(first_request * request_rows + first_row) * d,
        ),
        src=result,
    )


def attend_request(
    context: PagedSegments,
    request: int,
    length: nisa.VirtualRegister,  # tokens of the request
    remaining: nl.NkiTensor,  # [128, 1] fp32: the same, consumed
    first_head: int,
    queries: list[nl.NkiTensor],  # per tile of KV heads: [heads * d, rows]
    neg_shift: nl.NkiTensor,  # [rows, 1] fp32, softmax state, updated
    row_sum: nl.NkiTensor,  # [rows, 1] fp32, updated
    acc: nl.NkiTensor,  # [rows, KV heads * d] fp32, updated
    scale: float,
) -> None:
    """Softmax of one request's rows over its context, segment by segment."""
    d, tokens = context.d, context.tokens
    rows = row_sum.shape[0]
    heads_per_tile = PARTITIONS // d
    first_block = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=first_block, value=0)

    def segment(i: nisa.VirtualRegister) -> None:
        keys, values, seen = context.load(request, first_block, remaining, first_head)
        scores = nl.ndarray((rows, context.segment_size), dtype=nl.float32, buffer=nl.psum)
        for tile in range(len(queries)):
            head = tile * heads_per_tile
            heads = min(heads_per_tile, context.num_heads - head)
            k_t = transpose_row_tiles(
                RowTiles(keys, d, d, head * tokens * d, heads, tokens * d), tokens
            )
            for first in range(0, context.segment_size, MATMUL_COLUMNS):
                last = min(first + MATMUL_COLUMNS, context.segment_size)
                nisa.nc_matmul(
                    dst=scores[:, first:last],
                    stationary=queries[tile],
                    moving=k_t[:, first:last],
                    accumulate=tile > 0,
                )
        next_step(
            scores,
            context.mask_columns(seen, rows, 0, tokens),
            RowTiles(values, d, d, 0, context.num_heads, tokens * d),
            scale,
            neg_shift,
            row_sum,
            acc,
        )
        context.advance(first_block, remaining)

    nl.fori_loop(0, length, segment, step=context.segment_size)


@nki.jit
def paged_decode_kernel(
    q: nl.NkiTensor,  # [B, H, T, d]
    k_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d]
    v_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d]
    block_tables: nl.NkiTensor,  # [B, segments * segment_size / block_size] int32
    context_lens: nl.NkiTensor,  # [1, B] int32
    segment_size: int,
    scale: float,
) -> nl.NkiTensor:
    """Attention [B, H, T, d] of each request's newest token over its context."""
    num_requests, num_q_heads, num_queries, d = q.shape
    num_kv_heads = k_cache.shape[1]
    assert num_q_heads % num_kv_heads == 0, "query heads must be a multiple of KV heads"
    assert segment_size % PARTITIONS == 0, "segment_size must be a multiple of 128"
    assert segment_size % k_cache.shape[2] == 0, "segment_size must be whole blocks"
    assert segment_size <= MACRO_TILES * PARTITIONS, "a segment's scores must fit four PSUM banks"
    assert num_queries == 1, "one query per request"
    rows_per_kv_head = num_q_heads // num_kv_heads * num_queries
    assert rows_per_kv_head <= PARTITIONS, "the queries of a KV head must fit 128 partitions"
    num_heads = kv_heads_per_group(num_kv_heads, rows_per_kv_head, d)
    rows = num_heads * rows_per_kv_head
    per_group = min(num_requests, max(1, STATE_COLUMNS // (num_heads * d)))

    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    lengths = nl.ndarray((1, num_requests), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=lengths, src=context_lens)
    context = PagedSegments(k_cache, v_cache, block_tables, segment_size, num_heads)
    own_head = own_head_mask(num_heads, rows_per_kv_head)
    for first_head in range(0, num_kv_heads, num_heads):
        first_row = first_head * rows_per_kv_head
        for first in range(0, num_requests, per_group):
            count = min(per_group, num_requests - first)
            queries = spread_queries(
                q, first, count, first_row, rows, rows_per_kv_head, PARTITIONS // d
            )
            remaining = nl.ndarray((PARTITIONS, count), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(
                dst=remaining, src=context_lens.ap([[0, PARTITIONS], [1, count]], offset=first)
            )
            neg_shift = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
            row_sum = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
            acc = nl.ndarray((rows, count * num_heads * d), dtype=nl.float32, buffer=nl.sbuf)
            nisa.memset(dst=neg_shift, value=-scale * FLOOR)
            nisa.memset(dst=row_sum, value=0.0)
            nisa.memset(dst=acc, value=0.0)
            for i in range(count):
                length = nisa.register_alloc()
                nisa.register_load(length, lengths[:, first + i : first + i + 1])
                own_columns = []
                for tile in range(len(queries)):
                    own_columns.append(queries[tile][:, i * rows : (i + 1) * rows])
                attend_request(
                    context,
                    first + i,
                    length,
                    remaining[:, i : i + 1],
                    first_head,
                    own_columns,
                    neg_shift[:, i : i + 1],
                    row_sum[:, i : i + 1],
                    acc[:, i * num_heads * d : (i + 1) * num_heads * d],
                    scale,
                )
            store_requests(out, first, first_row, own_head, row_sum, acc)
    return out
