"""paged_decode: attention of the last tokens of each request over its paged context.

Formula. Request b has context_lens[b] tokens in the cache; the last query_lens[b] of them are its
queries. Query t < query_lens[b] stands at position p = context_lens[b] - query_lens[b] + t. For
query head h on KV head g:
    out[b, h, t] = softmax over the positions max(0, p - sliding_window + 1) .. p whose block is
                   mapped of scale * q[b, h, t] . key[g, j], times value[g, j]
where sinks[h] joins the sum of the softmax as one more logit without a value, and keys and values
are the stored ones times k_scale[g], v_scale[g]. Other rows are zero.

Values may have another size dv than keys. Without a V cache they are the first dv features of the
keys, times v_scale: the latent of MLA in its absorbed form.

Supported range and errors. Any B >= 1, H a multiple of KV, H / KV * T <= 128, d up to 576, dv up to
512, block_size a power of two; bf16, fp16 or fp32, caches the same or of one byte; one or two
cores. Unused cache rows and padded queries may hold NaN or infinity. Lengths, tables, windows and
holes are in the lists of `kernels/plan`, made on the host once per step for all layers; sizes that
are compiled in depend on shapes alone. `segattn.kernels.paged_decode` raises ValueError for
anything else; the kernel only asserts shapes.

Loop nest. Batch of work tiles (runtime count, the same on both cores) -> work tile: up to 128 runs
of `tokens` tokens -> token of the runs. The only device loop is the one over batches; its body is
decode/work_tile.py, where the pipeline is drawn. Nothing but SBUF goes from trip to trip.

Layouts. Run r of a tile on partition p, S segments of `rows` query rows in a tile:
    keys, values  [128 p, (token, d)]       one descriptor per run; pre-transposed keys (d, token)
    queries       [features, (pack, segment, row)]
    scores        [128 p, (segment, row, token)] PSUM, one bank;  weights (token, segment, row)
    row maxima, row sums, outputs   [128 or d, (segment, row)], the same on all partitions

On-chip memory per partition: 3 staging tiles of 8 KiB each for keys and for values (16 KiB for
pre-transposed keys), 5 * 2 KiB transposed keys, 2 KiB weights and 4 KiB fp32 scores in flight per
tile, 4 * N * rows bytes for each of the states. PSUM: transposes 2 banks, scores 3, outputs, sums
and maxima five quarters of one.

Numerics. Exact running maximum of every row, never below FLOOR; scores minus maximum in fp32, exp
of it, fp32 sums; weights in the dtype of q. Partitions that are absent or of another segment are
masked, edge tokens that a row does not see are replaced. Requests that share a tile multiply each
other's keys and queries: NaN or infinity in one makes NaN of all. The host function runs requests
that are not finite again, each alone. fp8 keys enter PE as they are; k_scale joins the softmax
scale in fp32, v_scale the result. A sequence that two cores share is added up at the end.
"""

import math

from ..backend import nisa, nki, nl
from ..sizes import PARTITIONS, ScoreNumbers
from .decode.batch import (
    Constants,
    DecodeArguments,
    DecodeSizes,
    Psum,
    State,
    exponentials,
    new_state,
    numbers_of,
    read_lists,
)
from .decode.keys import KeyColumns, KeyRows, KeySource
from .decode.results import store_outputs
from .decode.stages import Stages
from .decode.work_tile import Batch

ZERO_COLUMNS = 32768
"""Elements that one store of zeros clears of a sequence's rows."""


def clear_empty(empty: nl.NkiTensor, core: int, args: DecodeArguments) -> None:
    """Store zeros, and an lse of -inf, for the sequences that see nothing.

    empty [cores, 128 * n] int32 HBM.
    """
    room, width = empty.shape[1], args.rows * args.value_dim
    sequences = args.out_rows.reshape((args.out_rows.shape[0] // args.rows, width))
    part = min(width, ZERO_COLUMNS)
    zeros = nl.ndarray((PARTITIONS, part), dtype=args.out.dtype, buffer=nl.sbuf)
    nisa.memset(dst=zeros, value=0.0, engine=nisa.engine.gpsimd)
    nothing = nl.ndarray((PARTITIONS, args.rows), dtype=nl.float32, buffer=nl.sbuf)
    if args.lse is not None:
        nisa.memset(dst=nothing, value=-math.inf, engine=nisa.engine.gpsimd)
    for first in range(0, room, PARTITIONS):
        index = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(
            dst=index, src=empty.ap([[1, PARTITIONS], [1, 1]], offset=core * room + first)
        )
        for column in range(0, width, part):
            count = min(part, width - column)
            nisa.dma_copy(
                dst=sequences.ap(
                    [[width, PARTITIONS], [1, count]], offset=column, vector_offset=index,
                    indirect_dim=0,
                ),
                src=zeros[:, 0:count],
                oob_mode=nisa.oob_mode.skip,
            )  # fmt: skip
        if args.lse is not None:
            nisa.dma_copy(
                dst=args.lse.reshape((sequences.shape[0], args.rows)).ap(
                    [[args.rows, PARTITIONS], [1, args.rows]], offset=0, vector_offset=index,
                    indirect_dim=0,
                ),
                src=nothing,
                oob_mode=nisa.oob_mode.skip,
            )  # fmt: skip


def carry(last: State, carried: State) -> None:
    """Keep the state of the last tile for the next batch."""
    nisa.tensor_copy(dst=carried.row_max, src=last.row_max)
    for own, new in zip(carried.sums(), last.sums(), strict=True):
        nisa.tensor_copy(dst=own, src=new)


def merge_cores(
    args: DecodeArguments, constants: Constants, carried: State, core: int, shared: nl.NkiTensor
) -> None:
    """Add up the sequence that both cores end with; shared [cores, 128, 5] int32 HBM."""
    rows = args.rows
    numbers = nl.ndarray((PARTITIONS, 5), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=numbers, src=shared.ap([[5, PARTITIONS], [1, 5]], offset=core * 5 * PARTITIONS)
    )
    is_last = nl.ndarray((PARTITIONS, 1), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_copy(dst=is_last, src=numbers[:, 4:5])
    width = (2 + len(carried.outputs)) * rows
    mine = nl.ndarray((PARTITIONS, width), dtype=nl.float32, buffer=nl.sbuf)
    other = nl.ndarray((PARTITIONS, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=mine, value=0.0)
    last = carried.last(rows)
    for i, each in enumerate([carried.row_max, *carried.sums()]):
        height, end = each.shape[0], [last.row_max, *last.sums()][i]
        picked = nl.ndarray((height, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=picked, src=each[:, 0:rows])
        nisa.tensor_copy_predicated(
            dst=picked, src=end, predicate=is_last.ap([[1, height], [0, rows]])
        )
        nisa.tensor_copy(dst=mine[0:height, i * rows : (i + 1) * rows], src=picked)
    nisa.sendrecv(src=mine, dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
    psum = Psum(args.q.dtype, len(args.feature_parts))
    factors: nl.NkiTensor | None = None
    if args.score_k_scales is not None:
        column = numbers_of(args.score_k_scales, numbers[0:rows, 2:3])
        nisa.tensor_scalar(dst=column, data=column, op0=nl.multiply, operand0=args.scale)
        factors = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=factors, src=constants.spread(column, psum.maxima[1]))
    row_max = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=row_max, data1=mine[:, 0:rows], data2=other[:, 0:rows], op=nl.maximum)
    for state in (mine, other):
        change = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=change, data1=state[:, 0:rows], data2=row_max, op=nl.subtract)
        alpha = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
        exponentials(alpha, change, args.scale, factors)
        for i in range(1, width // rows):
            own = state[:, i * rows : (i + 1) * rows]
            nisa.tensor_tensor(dst=own, data1=own, data2=alpha, op=nl.multiply)
    nisa.tensor_tensor(
        dst=mine[:, rows:width], data1=mine[:, rows:width], data2=other[:, rows:width], op=nl.add
    )
    found = [row_max[0:1, :], mine[0:1, rows : 2 * rows]]
    for part, (_, number) in enumerate(args.feature_parts):
        found.append(mine[0:number, (2 + part) * rows : (3 + part) * rows])
    real = nl.ndarray((rows, 1), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_copy(dst=real, src=numbers[0:rows, 3:4])
    columns = [numbers[0:rows, i : i + 1] for i in range(3)]
    predicate = real.ap([[1, rows], [0, args.value_dim]])
    store_outputs(args, constants, psum.scores[0], found, columns, predicate)


@nki.jit
def paged_decode_kernel(
    q: nl.NkiTensor,  # [B, H, T, d]
    k_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d], or [num_blocks, KV, d, block_size]
    v_cache: nl.NkiTensor | None,  # [num_blocks, KV, block_size, dv]; None: features of the keys
    num_batches: nl.NkiTensor,  # the arrays of plan.decode_plan.DecodeLists, in its order
    indices: nl.NkiTensor,
    masks: nl.NkiTensor,
    flags: nl.NkiTensor,
    shared: nl.NkiTensor,
    empty: nl.NkiTensor,
    sizes: DecodeSizes,
    numbers: ScoreNumbers,
    sinks: nl.NkiTensor | None = None,  # [1, H] fp32
    k_scales: nl.NkiTensor | None = None,  # [1, KV] fp32
    v_scales: nl.NkiTensor | None = None,  # [1, KV] fp32
    k_pre_transposed: bool = False,
    with_lse: bool = False,
    value_dim: int = 0,  # dv without a V cache
) -> nl.NkiTensor | tuple[nl.NkiTensor, nl.NkiTensor]:
    """Attention [B, H, T, dv] of each request's last tokens over its context, and lse [B, H, T]."""
    _, num_q_heads, num_queries, _ = q.shape
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[3 if k_pre_transposed else 2]
    if v_cache is not None:
        value_dim = v_cache.shape[3]
    sizes = DecodeSizes(*sizes)
    tiles = sizes.tiles
    assert block_size % sizes.tokens == 0, "a run must lie in one block"
    rows = num_q_heads // num_kv_heads * num_queries
    assert rows <= PARTITIONS, "the query rows of a sequence must fit 128 partitions"
    core, num_cores = nl.program_id(0), nl.num_programs(0)
    batches = indices.shape[0] // num_cores
    out = nl.ndarray((*q.shape[:3], value_dim), dtype=q.dtype, buffer=nl.shared_hbm)
    if block_size == 1:
        k_cache = k_cache.reshape(
            (*k_cache.shape[:2], 1, q.shape[3])
        )  # one token is a row in either layout
    keys: KeySource = KeyRows(k_cache, q.dtype, sizes.edge_tokens)
    if k_pre_transposed and block_size > 1:
        keys = KeyColumns(k_cache, q.dtype)
    lse = None
    if with_lse:
        lse = nl.ndarray(q.shape[:3], dtype=nl.float32, buffer=nl.shared_hbm)
    args = DecodeArguments(
        q, v_cache, out, lse, keys, ScoreNumbers(*numbers), sinks, k_scales, v_scales, rows,
        masks.shape[2] - 2 * tiles, *sizes,
    )  # fmt: skip
    num_parts = len(args.parts)
    number = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=number, value=core * batches)
    one = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=one, value=1)
    stages = Stages(args, k_cache.dtype, num_parts)
    stages.clear()
    constants = Constants()
    tile_columns = args.segments // tiles * rows
    carried = new_state(args, tile_columns)
    carried.clear()
    clear_empty(empty, core, args)

    def attend_batch(_: object) -> None:
        lists = read_lists([indices, masks, flags], number, tiles, num_parts)
        batch = Batch(args, constants, stages, lists)
        state = batch.run(carried)
        if batches > 1 or num_cores == 2:
            carry(state.last(tile_columns), carried)
        for part, (first, count) in enumerate(args.parts):
            height, at = count * rows, first * rows
            own = state.of(at, height)
            sums = [own.row_max[0:1, :], own.row_sum[0:1, :], *own.outputs]
            columns = [lists.column(kind, part)[0:height, :] for kind in (2, 3, 4)]
            real = lists.flags.ap(
                [[lists.flags.shape[1], height], [0, args.value_dim]], offset=part
            )
            bank = batch.psum.next_scores()
            store_outputs(args, constants, bank, sums, columns, real)
        nisa.tensor_tensor(dst=number, data1=number, data2=one, op=nl.add)

    if batches == 1:
        attend_batch(0)
    else:
        count = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=count, src=num_batches[core : core + 1, :])
        end = nisa.register_alloc()
        nisa.register_load(end, count)
        nl.fori_loop(0, end, attend_batch)
    if num_cores == 2:
        merge_cores(args, constants, carried, core, shared)
    return out if lse is None else (out, lse)
