"""paged_decode: attention of the last tokens of each request over its paged context.

Formula. Request b has context_lens[b] tokens in the cache; the last query_lens[b] of them are its
queries. Query t < query_lens[b] stands at position p = context_lens[b] - query_lens[b] + t. For
query head h on KV head g:
    out[b, h, t] = softmax over the positions max(0, p - sliding_window + 1) .. p whose block is
                   mapped of scale * q[b, h, t] . key[g, j], times value[g, j]
where sinks[h] joins the sum of the softmax as one more logit without a value, and keys and values
are the stored ones times k_scale[g], v_scale[g]. Other rows are zero.

Supported range and errors. Any B >= 1, H a multiple of KV, H / KV * T <= 128, head_dim up to 256,
block_size a power of two >= 16; bf16, fp16 or fp32, caches the same or fp8 with scales; one or two
cores.
Unused cache rows and padded queries may hold NaN or infinity. Lengths, tables, windows and holes
are in the lists of `kernels/plan`, made on the host for each step; sizes that are compiled in
depend on shapes alone. `segattn.kernels.paged_decode` raises ValueError for anything else; the
kernel only asserts shapes.

Loop nest. Group of slots (runtime count) -> slot: up to 128 runs of `tokens` tokens -> run token.
A slot holds spans: runs of up to `slot_spans` chains; a chain is a request on `heads` KV heads. A
trip of the loop has the scores of a group and the values of the one before (decode/pipeline.py), so
that gathers are a group ahead, softmax hides behind transposes, and work is rounded up to one
group. Two cores take half of the slots each.

Layouts, N = slots * slot_spans * rows of a group, run r of a slot on partition p, its token j:
    keys, values  [128 p, (head, j, d)]        4 KiB descriptors where a run has them
    key columns   [features <= 128, 128 p]     of one j, or of 128 / d of them; fp8 in pairs of
                                               features, of one j or of 256 / d
    queries       [features, (j, span, row)]   zero outside the j of the feature where there are
                                               several; for fp8 even and odd features apart
    scores        [128 p, (span, row, j)] PSUM, up to four banks;  weights [128 p, (j, span, row)]
    sums          [d, (span, row)] PSUM, row sums beside them
    edge tokens   one per partition, against the rows of all spans
With key_blocks the K cache is [num_blocks, KV, d, block_size]: keys of a slot are staged as
[features, (head, block, token)], and DVE selects the columns of one j, zero for absent runs.

On-chip memory per partition: staging tiles of at most 2 * 16 KiB for keys and values of a group;
key columns 4 * 2 KiB; weights b N (tokens + edge tiles), queries pack * b N, states 24 * N for d up
to 128: 4 slots of 2 spans with 8 rows, d = 128, bf16, N = 64: 32 + 8 + 2.2 + 0.1 + 1.5, edge
tokens, lists and temporary tiles at most 8 = 52 KiB; before the first group also zeros, 4 KiB.
PSUM: scores 1 to 4 banks, transposes 5 to 2, weighted values 1, small numbers and edge tokens 1.

Numerics. Exact running maximum of every row, never below FLOOR; scores minus maximum in fp32, exp
of it, fp32 sums; weights in the dtype of q. Runs that are absent or of another span get MASKED
added by PE, edge tokens that a row does not see are replaced; only real, mapped rows of the cache
are gathered, so staging tiles are as finite as those rows. Requests that share a slot or a tile of
edge tokens multiply each other's keys and queries: NaN, infinity or a product beyond fp32 (|q| |k|
above 1e38) in one makes NaN of all. The host function runs requests that are not finite again, each
alone. fp8 keys enter PE as they are, past a transpose of pairs as 16-bit elements, which trn2 does
bit by bit; k_scale joins the softmax scale in fp32, v_scale the result. A chain that two cores
share is added up at the end with its own maxima.
"""

from ..backend import nisa, nki, nl
from ..sizes import MASKED, PARTITIONS, SLOT_BYTES
from .decode.group import DecodeGroup
from .decode.pipeline import GroupEnd, GroupScores, begin
from .decode.stage import DecodeStage
from .decode.sums import SpanSums, SumsShape
from .decode.tensors import (
    ChainFactors,
    DecodeBuffers,
    DecodePlanTensors,
    DecodeTensors,
    store_rows,
)
from .loading import element_bytes


def group_count(num_groups: nl.NkiTensor, core: int) -> nisa.VirtualRegister:
    """The number of groups of a core in a register."""
    number = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=number, src=num_groups[core : core + 1, :])
    register = nisa.register_alloc()
    nisa.register_load(register, number)
    return register


def clear_empty(
    empty_chains: nl.NkiTensor,  # [cores, 128 * n] int32 HBM
    core: int,
    rows: int,
    zeros: nl.NkiTensor,  # [128, SLOT_BYTES / 4] fp32
    out: nl.NkiTensor,  # [B, H, T, d]
) -> None:
    """Store zeros for the chains that see nothing."""
    num_requests, num_q_heads, num_queries, d = out.shape
    room = empty_chains.shape[1]
    chains = out.reshape((num_requests * num_q_heads * num_queries // rows, rows * d))
    per_row = SLOT_BYTES // element_bytes(out.dtype)
    for first in range(0, room, PARTITIONS):
        index = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(
            dst=index, src=empty_chains.ap([[1, PARTITIONS], [1, 1]], offset=core * room + first)
        )
        nisa.dma_copy(
            dst=chains.ap(
                [[rows * d, PARTITIONS], [d, rows], [1, d]], offset=0, vector_offset=index,
                indirect_dim=0,
            ),
            src=zeros.ap([[per_row, PARTITIONS], [0, rows], [1, d]], dtype=out.dtype),
            oob_mode=nisa.oob_mode.skip,
        )  # fmt: skip


def share_chain(
    tensors: DecodeTensors,
    buffers: DecodeBuffers,
    last: SpanSums,  # of the core
    scale: float,
    core: int,
    shared_chain: nl.NkiTensor,  # [cores, 1, 2] int32 HBM
    shared_out_rows: nl.NkiTensor,  # [cores, 1, rows] int32 HBM
    shared_real_rows: nl.NkiTensor,  # [cores, 1, rows] uint8 HBM
    out: nl.NkiTensor,
) -> None:
    """Add up the chain that both cores end with: the other core's state is one more span."""
    shape, height, rows = last.shape, last.height, last.shape.rows
    parts = shape.parts + 1
    values = parts * rows
    mine = nl.ndarray((PARTITIONS, values + rows), dtype=nl.float32, buffer=nl.sbuf)
    other = nl.ndarray((PARTITIONS, values + rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=mine, value=0.0)
    nisa.tensor_copy(
        dst=mine[0:height, 0:values], src=last.state_column(last.sums, last.spans, parts)
    )
    nisa.tensor_copy(
        dst=mine[:, values : values + rows], src=last.state_column(last.shift, last.spans, 1)
    )
    nisa.sendrecv(src=mine, dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
    group = nl.ndarray((1, 2), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=group, src=shared_chain.ap([[2, 1], [1, 2]], offset=2 * core))
    factors = ChainFactors(tensors, buffers, scale, 1)
    factors.fetch(group)
    factors.load()
    begins = nl.ndarray((PARTITIONS, 2), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=begins[:, 0:1], value=MASKED)
    nisa.memset(dst=begins[:, 1:2], value=0.0)
    sums = SpanSums(shape, 1, begins)
    sums.write_constants()
    sums.begin(last, other[:, values : values + rows])
    sums.correct(factors)
    # The other state was made with its own shift.
    change = nl.ndarray((height, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=change, data1=other[0:height, values : values + rows],
        data2=sums.by_span(sums.shift, height, 0), op=nl.subtract,
    )  # fmt: skip
    keys = factors.keys
    if keys is not None:
        keys = keys[0:height, :]
    factors.exponentials(change, change, keys)
    nisa.tensor_tensor(
        dst=other[0:height, 0:values], data1=other[0:height, 0:values],
        data2=change.ap([[rows, height], [0, parts], [1, rows]]), op=nl.multiply,
    )  # fmt: skip
    sums.add(last, other[0:height, 0:values])

    out_rows = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    column = [[1, rows], [1, 1]]
    nisa.dma_copy(dst=out_rows, src=shared_out_rows.ap(column, offset=core * rows))
    real_rows = nl.ndarray((rows, 1), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.dma_copy(dst=real_rows, src=shared_real_rows.ap(column, offset=core * rows))
    outputs = nl.ndarray((height, shape.parts * rows), dtype=nl.float32, buffer=nl.sbuf)
    sums.normalise(factors.spread_sinks(height), factors, outputs)
    store_rows(outputs, buffers, factors.values, real_rows, out_rows, out)


@nki.jit
def paged_decode_kernel(
    q: nl.NkiTensor,  # [B, H, T, d]
    k_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d]
    v_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d]
    num_groups: nl.NkiTensor,  # the arrays of plan.decode_plan.DecodePlan, in its order
    gather_rows: nl.NkiTensor,
    chains: nl.NkiTensor,
    absent: nl.NkiTensor,
    edge_seen: nl.NkiTensor,
    begins: nl.NkiTensor,
    out_rows: nl.NkiTensor,
    real_rows: nl.NkiTensor,
    shared_chain: nl.NkiTensor,
    shared_out_rows: nl.NkiTensor,
    shared_real_rows: nl.NkiTensor,
    empty_chains: nl.NkiTensor,
    heads: int,  # KV heads of a chain
    tokens: int,  # tokens of a run
    slots: int,  # slots of a group
    scale: float,
    sinks: nl.NkiTensor | None,  # [1, H] fp32
    k_scales: nl.NkiTensor | None,  # [1, KV] fp32
    v_scales: nl.NkiTensor | None,  # [1, KV] fp32
    key_blocks: nl.NkiTensor | None = None,  # with these arrays of the plan the K cache is
    present: nl.NkiTensor | None = None,  # [num_blocks, KV, d, block_size]
) -> nl.NkiTensor:
    """Attention [B, H, T, d] of each request's last tokens over its context."""
    _, num_q_heads, num_queries, d = q.shape
    num_kv_heads = k_cache.shape[1]
    assert v_cache.shape[2] % tokens == 0, "a run must lie in one block"
    rows = num_q_heads // num_kv_heads * heads * num_queries
    assert rows <= PARTITIONS, "the query rows of a chain must fit 128 partitions"
    core = nl.program_id(0)
    num_cores = nl.num_programs(0)
    spans = chains.shape[1] // 2
    length = chains.shape[0] // num_cores
    edge_tiles = gather_rows.shape[2] - slots
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)

    tensors = DecodeTensors(q, k_cache, v_cache, sinks, k_scales, v_scales, heads, tokens, rows)
    plan = DecodePlanTensors(
        gather_rows, chains, absent, edge_seen, begins, out_rows, real_rows, key_blocks, present,
        core * length,
    )  # fmt: skip
    shape = SumsShape(rows, d, (d + PARTITIONS - 1) // PARTITIONS)
    zeros = nl.ndarray((PARTITIONS, SLOT_BYTES // 4), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=zeros, value=0.0)
    buffers = DecodeBuffers(tensors, slots, spans // slots)
    stage = DecodeStage(tensors, plan, slots, spans, edge_tiles)
    group = DecodeGroup(stage, buffers, shape, scale)
    begin(group, zeros)
    group.sums.clear()
    clear_empty(empty_chains, core, rows, zeros, out)
    if length > 1:
        count = group_count(num_groups, core)
        stage.fetch_key_rows(None, 1)
        stage.fetch_key_chains(None, 1)
        stage.value_rows.fetch(None, 1)
    group.turn_queries()
    GroupScores(group, None, length > 1).attend(None)
    group.mask_edges()
    if length > 1:
        stage.fetch_chains(None, 1)
        stage.begins.fetch(None, 0)
        for each in stage.result_lists():
            each.fetch(None, 0)

        def next_group(i: nisa.VirtualRegister) -> None:
            stage.begins.take_all()
            for each in stage.score_lists():
                each.take_all()
            group.factors.load()
            scores = GroupScores(group, i, True)
            group.find_maximum()
            scores.turn(1)
            group.find_shifts()
            scores.begin()
            group.weigh()
            group.turn_queries()
            stage.begins.fetch(i, 0)
            group.factors.fetch(stage.chains)
            scores.attend(GroupEnd(group, i, out))
            group.mask_edges()

        nl.fori_loop(1, count, next_group)
        stage.begins.take_all()
        for each in stage.result_lists():
            each.take_all()
    group.factors.load()
    group.find_maximum()
    group.find_shifts()
    group.weigh()
    group.weigh_edges()
    for slot in range(slots):
        group.weigh_slot(slot)
    group.sum_weights()
    group.add()
    group.normalise()
    group.store(out)
    if num_cores == 2:
        share_chain(
            tensors, buffers, group.sums, scale, core, shared_chain, shared_out_rows,
            shared_real_rows, out,
        )  # fmt: skip
    return out
