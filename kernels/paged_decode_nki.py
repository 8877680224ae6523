"""paged_decode: attention of the last tokens of each request over its paged context.

Formula. Request b has context_lens[b] tokens in the cache; the last query_lens[b] of them are its
queries. Query t < query_lens[b] stands at position p = context_lens[b] - query_lens[b] + t. For
query head h on KV head g:
    out[b, h, t] = softmax over the positions max(0, p - sliding_window + 1) .. p whose block is
                   mapped of scale * q[b, h, t] . key[g, j], times value[g, j]
where sinks[h] joins the sum of the softmax as one more logit without a value, and keys and values
are the stored ones times k_scale[g], v_scale[g]. Other rows are zero.

Supported range. Any B >= 1, H a multiple of KV, H / KV * T <= 128, head_dim up to 256, block_size
a power of two >= 16; bf16, fp16 or fp32, caches the same or fp8 with scales; one or two cores.
Unused cache rows and padded queries may hold NaN or infinity. Lengths, tables, windows and holes
are in the lists of `decode.plan`, made on the host for each step; sizes that are compiled in
depend on shapes alone. `segattn.kernels.paged_decode` checks arguments; the kernel only asserts
shapes.

Loop nest. Trip (runtime count) -> group of slots -> slot: up to 128 runs of `tokens` tokens of one
chain (a request on `heads` KV heads) -> run token. While a group's keys are transposed and scored,
the group before it weighs its values; the gathers are two groups to a trip ahead. Two cores take
half of the slots each.

Layouts, N = slots * rows of a group, run r of a slot on partition p, its token j:
    keys, values  [128 p, (head, j, d)]        4 KiB descriptors where a run has them
    key columns   [features <= 128, 128 p]     of one j, or of 128 / d of them; fp8 in pairs of
                                               features, of one j or of 256 / d
    queries       [features, (j, slot, row)]   zero outside the j of the feature where there are
                                               several; for fp8 even and odd features apart
    scores        [128 p, (slot, row, j)] PSUM, one or two banks;  weights [128 p, (j, slot, row)]
    sums          [d, (slot, row)] PSUM, row sums beside them
    edge tokens   one per partition, against the rows of all slots
With key_blocks the K cache is [num_blocks, KV, d, block_size]: keys of a slot are staged as
[features, (head, block, token)], and DVE selects the columns of one j, zero for absent runs.

On-chip memory per partition: staging tiles of at most 2 * 64 KiB for keys and values of a trip; key
columns 4 * 2 KiB; per group scores to be weighed 4 N tokens, weights b N (tokens + edge tiles),
queries pack * b N, states 24 * (slots + 1) * rows: 4 groups of 4 slots with 8 rows, d = 128, bf16:
128 + 8 + 4 * (2 + 1.1 + 0.1 + 1) = 153 KiB. PSUM: scores 2 or 4 banks, transposes 4 or 2, weighted
values 1, small numbers and edge tokens 1.

Numerics. Exact running maximum of every row, never below FLOOR; scores minus maximum in fp32, exp
of it, fp32 sums; weights in the dtype of q. Absent runs get MASKED added by PE, edge tokens that a
row does not see are replaced; only real, mapped rows of the cache are gathered, so staging tiles
are finite throughout. fp8 keys enter PE as they are, past a transpose of pairs as 16-bit elements,
which trn2 does bit by bit; k_scale joins the softmax scale in fp32, v_scale the result. A chain
that two cores share is added up at the end with its own maxima.
"""

from .backend import nisa, nki, nl
from .decode.group import DecodeGroup
from .decode.stage import DecodeStage
from .decode.sums import SlotSums, SumsShape
from .decode.tensors import (
    SLOT_BYTES,
    ChainFactors,
    DecodeBuffers,
    DecodePlanTensors,
    DecodeTensors,
    clear,
    store_rows,
)
from .loading import element_bytes
from .tile_schedule import PARTITIONS

SCORE_LAG = 2
"""Banks of keys that PE transposes ahead of their scores, so that it never waits for a copy."""


def trip_register(num_trips: nl.NkiTensor, core: int, column: int) -> nisa.VirtualRegister:
    """A number of a core in a register."""
    number = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=number, src=num_trips[core : core + 1, column : column + 1])
    register = nisa.register_alloc()
    nisa.register_load(register, number)
    return register


class GroupStart(nl.NKIObject):
    """Loading of a group for the first trip, in steps."""

    def __init__(self, group: DecodeGroup, zeros: nl.NkiTensor, engines: list[nisa.engine]) -> None:
        self.group = group
        self.zeros = zeros
        self.engines = engines  # that clear the first staging tile, then the others in turn
        self.done = 0
        self.steps = 2 * group.slots + 3

    def step(self) -> None:
        """Tables, then one staging tile per step: cleared, because a gather skips absent rows."""
        group, step = self.group, self.done
        stage = group.stage
        self.done = step + 1
        if step == 0:
            stage.fetch_rows(None, 0)
            return
        engine = self.engines[min(step, len(self.engines)) - 1]
        if step > 1:
            engine = self.engines[1 + step % (len(self.engines) - 1)]
        tile = step - 1
        tiles = group.slots + 1
        if tile < tiles:
            for keys in stage.k_stage[tile]:
                clear(keys, self.zeros, engine)
            stage.gather_keys(tile)
        else:
            clear(stage.v_stage[tile - tiles], self.zeros, engine)
            stage.gather_values(tile - tiles)
        if step == 1:
            stage.fetch_queries()
            group.begin_trip(None)

    def finish(self) -> None:
        """All steps that are left."""
        while self.done < self.steps:
            self.step()


class GroupEnd(nl.NKIObject):
    """What follows the scores of a group, in steps that keep PE from waiting."""

    def __init__(
        self, groups: list[DecodeGroup], index: int, out: nl.NkiTensor, prefetch: bool
    ) -> None:
        self.group = groups[index]
        self.before = groups[index - 1].sums
        self.out = out
        self.prefetch = prefetch
        self.done = 0
        self.steps = self.group.slots + 2

    def step(self) -> None:
        """The values of each slot; sums and results."""
        group, step = self.group, self.done
        self.done = step + 1
        if step < group.slots:
            if step == 0:
                group.weigh_edges()
            group.weigh_slot(step)
            if self.prefetch:
                group.stage.gather_values(step)
        elif step == group.slots:
            group.sum_weights()
            group.add(self.before)
            if self.prefetch:
                group.stage.gather_values(group.slots)
        else:
            group.store(self.out)

    def finish(self) -> None:
        """All steps that are left."""
        while self.done < self.steps:
            self.step()


def score(
    group: DecodeGroup, before: SlotSums, ends: list[GroupEnd], starts: list[GroupStart]
) -> None:
    """Scores and weights of a group, other groups' work beside them."""
    group.turn_queries()
    banks = group.keys.banks()
    for bank in range(banks):
        engine = nisa.engine.vector
        if bank % 2 == 1 and len(starts) == 0:
            engine = nisa.engine.scalar
        group.keys.turn_bank(bank, engine)
        if len(group.keys.turned) > SCORE_LAG:
            group.score_bank()
        for end in ends:
            while end.done < (bank + 1) * end.steps // banks:
                end.step()
        for start in starts:
            while start.done < (bank + 1) * start.steps // banks:
                start.step()
    while len(group.keys.turned) > 0:
        group.score_bank()
    for end in ends:
        end.finish()
    for start in starts:
        start.finish()
    group.mask_edges()
    group.find_shifts(before)
    group.weigh()


def first_trip(
    groups: list[DecodeGroup],
    buffers: DecodeBuffers,
    core: int,
    empty_chains: nl.NkiTensor,  # [cores, 128 * n] int32 HBM
    zeros: nl.NkiTensor,  # [128, SLOT_BYTES / 4] fp32
    out: nl.NkiTensor,
    more: nisa.VirtualRegister | None,  # 1 if a second trip has work; None: there is none
) -> None:
    """The first trip loads its own slots, two groups ahead, before those of the second."""
    count = len(groups)
    others = [nisa.engine.vector, nisa.engine.scalar]
    GroupStart(groups[0], zeros, [nisa.engine.gpsimd] + others).finish()
    clear_empty(empty_chains, core, groups[0].rows, zeros, out)
    if count > 1:
        GroupStart(groups[1], zeros, [nisa.engine.vector] + others).finish()
    buffers.write_constants()
    for group in groups:
        group.write_constants()
    groups[count - 1].sums.clear()
    ends: list[GroupEnd] = []
    for index in range(count):
        starts: list[GroupStart] = []
        if index + 2 < count:
            starts.append(
                GroupStart(groups[index + 2], zeros, [nisa.engine.scalar, nisa.engine.scalar])
            )
        groups[index].fetch_factors()
        groups[index].factors.load()
        score(groups[index], groups[index - 1].sums, ends, starts)
        ends = [GroupEnd(groups, index, out, False)]
    if more is not None:

        def fetch_second(i: nisa.VirtualRegister) -> None:
            for index in range(count):
                group = groups[index]
                group.stage.fetch_rows(None, 1)
                group.fetch_factors()
                group.stage.fetch_queries()
                for slot in range(group.slots + 1):
                    group.stage.gather_keys(slot)
                if index < count - 1:
                    for slot in range(group.slots + 1):
                        group.stage.gather_values(slot)

        nl.fori_loop(0, more, fetch_second)
    ends[0].finish()
    if more is not None:

        def fetch_last(i: nisa.VirtualRegister) -> None:
            stage = groups[count - 1].stage
            for slot in range(stage.slots + 1):
                stage.gather_values(slot)

        nl.fori_loop(0, more, fetch_last)


def next_trip(groups: list[DecodeGroup], trip: nisa.VirtualRegister, out: nl.NkiTensor) -> None:
    """A later trip: each staging tile is gathered anew as soon as it has been read."""
    for group in groups:
        group.begin_trip(trip)
    ends: list[GroupEnd] = []
    for index in range(len(groups)):
        group = groups[index]
        group.factors.load()
        group.stage.fetch_rows(trip, 1)
        score(group, groups[index - 1].sums, ends, [])
        ends = [GroupEnd(groups, index, out, True)]
        group.fetch_factors()
        group.stage.fetch_queries()
        for slot in range(group.slots + 1):
            group.stage.gather_keys(slot)
    ends[0].finish()


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
    last: SlotSums,  # of the core's last group
    scale: float,
    core: int,
    shared_chain: nl.NkiTensor,  # [cores, 1, 2] int32 HBM
    shared_out_rows: nl.NkiTensor,  # [cores, 1, rows] int32 HBM
    shared_real_rows: nl.NkiTensor,  # [cores, 1, rows] uint8 HBM
    out: nl.NkiTensor,
) -> None:
    """Add up the chain that both cores end with: the other core's state is one more slot."""
    shape, height, rows = last.shape, last.height, last.shape.rows
    parts = shape.parts + 1
    values = parts * rows
    mine = nl.ndarray((PARTITIONS, values + rows), dtype=nl.float32, buffer=nl.sbuf)
    other = nl.ndarray((PARTITIONS, values + rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=mine, value=0.0)
    nisa.tensor_copy(
        dst=mine[0:height, 0:values], src=last.state_column(last.sums, last.slots, parts)
    )
    nisa.tensor_copy(
        dst=mine[:, values : values + rows], src=last.state_column(last.shift, last.slots, 1)
    )
    nisa.sendrecv(src=mine, dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
    group = nl.ndarray((1, 2), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=group, src=shared_chain.ap([[2, 1], [1, 2]], offset=2 * core))
    factors = ChainFactors(tensors, buffers, scale, 1)
    factors.fetch(group)
    factors.load()
    sums = SlotSums(shape, 1)
    sums.write_constants()
    nisa.memset(dst=sums.begins[:, 1:2], value=0.0)
    sums.begin(last, other[:, values : values + rows])
    sums.correct(factors)
    # The other state was made with its own shift.
    change = nl.ndarray((height, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=change, data1=other[0:height, values : values + rows],
        data2=sums.by_slot(sums.shift, height, 0), op=nl.subtract,
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
    num_trips: nl.NkiTensor,  # the arrays of decode.plan.DecodePlan, in its order
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
    entries, num_groups, slots = begins.shape
    length = entries // num_cores
    edge_tiles = gather_rows.shape[3] - slots
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)

    tensors = DecodeTensors(q, k_cache, v_cache, sinks, k_scales, v_scales, heads, tokens, rows)
    plan = DecodePlanTensors(
        gather_rows, chains, absent, edge_seen, begins, out_rows, real_rows, key_blocks, present,
        core * length,
    )  # fmt: skip
    shape = SumsShape(rows, d, (d + PARTITIONS - 1) // PARTITIONS)
    groups: list[DecodeGroup] = []
    zeros = nl.ndarray((PARTITIONS, SLOT_BYTES // 4), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=zeros, value=0.0)
    buffers = DecodeBuffers(tensors, slots)
    for index in range(num_groups):
        stage = DecodeStage(tensors, plan, index, slots, edge_tiles)
        groups.append(DecodeGroup(stage, buffers, shape, scale))
    if length == 1:
        first_trip(groups, buffers, core, empty_chains, zeros, out, None)
    else:
        last = trip_register(num_trips, core, 0)
        more = trip_register(num_trips, core, 1)
        first_trip(groups, buffers, core, empty_chains, zeros, out, more)

        def trip(i: nisa.VirtualRegister) -> None:
            next_trip(groups, i, out)

        nl.fori_loop(1, last, trip)
    if num_cores == 2:
        last_sums = groups[num_groups - 1].sums
        share_chain(
            tensors, buffers, last_sums, scale, core, shared_chain, shared_out_rows,
            shared_real_rows, out,
        )  # fmt: skip
    return out
