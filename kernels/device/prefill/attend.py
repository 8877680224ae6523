"""Attention of a chunk over its prior and itself, pass by pass: what both prefill kernels share.

A pass is some q_groups (tile_schedule.py): the first q_blocks of each over the chunk, all of them
over the prior, the last q_blocks over the chunk beside the results of the others.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...backend import nisa, nl
from ...sizes import PARTITIONS, SoftmaxArguments
from ..loading import broadcast_row, element_bytes, row_tile_view, runs_of
from ..masks import absent_rows, q_tile_rows, valid_rows
from ..tile_schedule import QGroup, core_q_groups, head_layout, passes_of
from .band import Band
from .bounded_softmax import BoundedSoftmax
from .chunk import ChunkKeys, ChunkStream
from .on_chip import sbuf
from .online_softmax import OnlineSoftmax
from .prior import Prior, PriorPass
from .query_tiles import QueryTiles
from .result import GroupResult, RowFacts
from .shift_estimate import estimate_shift, sampled_blocks
from .softmax_base import Softmax

ZERO_TILES = 8
"""Row tiles of one head that one store of zeros covers."""

FIRST_LOADS = 2
"""q_blocks whose loads come before those of the prior."""

Body = Callable[[nisa.VirtualRegister | int], None]


@dataclass(frozen=True)
class ChunkArguments:
    """What a kernel is given of the chunk, in HBM, and what it makes of it."""

    q: nl.NkiTensor
    """[H, S, d]."""
    own: tuple[nl.NkiTensor, nl.NkiTensor] | None
    """k and v [KV, S, d]; None: cross attention, over the prior alone."""
    num_tokens: nl.NkiTensor
    """[1, 1] int32."""
    sinks: nl.NkiTensor | None
    """[1, H] fp32."""
    out: nl.NkiTensor
    """[H, S, d], result."""
    lse: nl.NkiTensor | None
    """[H, S] fp32, result: logarithm of each row's sum; None: not asked for."""


@dataclass
class _Work:
    """A q_group of a pass."""

    queries: QueryTiles
    stream: ChunkStream
    result: GroupResult
    rows: RowFacts

    @property
    def group(self) -> QGroup:
        """The q_group."""
        return self.queries.group


class Prefill:
    """The work of one core."""

    def __init__(
        self, chunk: ChunkArguments, softmax: SoftmaxArguments, prior: Prior | None
    ) -> None:
        num_heads, num_rows, _ = chunk.q.shape
        assert num_rows % PARTITIONS == 0, "the number of rows must be a multiple of 128"
        if chunk.own is not None:
            self._num_kv_heads: int = chunk.own[0].shape[0]
        else:
            assert prior is not None, "cross attention needs a prior"
            self._num_kv_heads = prior.cache.v_cache.shape[1]
        assert num_heads % self._num_kv_heads == 0, "query heads must be a multiple of KV heads"
        self._chunk, self._given, self._prior = chunk, softmax, prior
        self._band = Band(softmax.window, softmax.causal)
        self._real = broadcast_row(chunk.num_tokens)
        self._every_valid = valid_rows(self._real, num_rows // PARTITIONS)
        self._every_sink = None if chunk.sinks is None else broadcast_row(chunk.sinks)
        if self._every_sink is not None and softmax.numbers.softcap:
            # Scores are sigmoids times 2 softcap: a softcap above the real ones.
            nisa.tensor_scalar(
                dst=self._every_sink, data=self._every_sink, op0=nl.add,
                operand0=softmax.numbers.softcap,
            )  # fmt: skip
        self._absent: nl.NkiTensor | None = None
        if chunk.own is not None and not softmax.causal and softmax.mode == "exact":
            self._absent = absent_rows(self._real, num_rows)
        self._keys: dict[int, ChunkKeys] = {}
        self._flags = sbuf((1, num_heads), nl.int32)
        nisa.memset(dst=self._flags, value=0)

    def run(self, cache_writes: Sequence[Iterator[None]]) -> None:
        """Every q_group; cache writes beside the first passes, finished by the caller."""
        q = self._chunk.q
        layout = head_layout(q.shape, self._num_kv_heads, element_bytes(q.dtype))
        groups = core_q_groups(layout, nl.program_id(0), nl.num_programs(0))
        zeros = self._zero_rows(groups)
        background = [zeros, *cache_writes]
        for some in passes_of(groups, layout.limit):
            if some[0].may_be_padding:
                for _ in zeros:
                    pass
                self._attend(some, [], self._is_real(some[0]))
            else:
                self._attend(some, background, None)

    def _is_real(self, group: QGroup) -> nisa.VirtualRegister:
        """1 if there are real rows from the first one of a q_group on, of either core, else 0."""
        is_real, number = sbuf((1, 1)), sbuf((1, 1), nl.int32)
        nisa.tensor_scalar(
            dst=is_real, data=self._real[0:1, :], op0=nl.greater,
            operand0=float(group.first_row_tile * PARTITIONS),
        )  # fmt: skip
        nisa.tensor_copy(dst=number, src=is_real)
        trips = nisa.register_alloc()
        nisa.register_load(trips, number)
        return trips

    def _zero_rows(self, groups: list[QGroup]) -> Iterator[None]:
        """Zero the rows of q_groups that may be left out, one head in each portion."""
        out, d = self._chunk.out, self._chunk.out.shape[2]
        later = [group for group in groups if group.may_be_padding]
        if not later:
            return
        zeros = sbuf((PARTITIONS, ZERO_TILES * d), out.dtype)
        nisa.memset(dst=zeros, value=0.0, engine=nisa.engine.gpsimd)
        for group in later:
            tiles = group.row_tiles[: group.num_stored]
            for head in range(group.first_head, group.first_head + group.num_heads):
                for first in range(0, len(tiles), ZERO_TILES):
                    count = min(ZERO_TILES, len(tiles) - first)
                    for tile, length in runs_of(tiles, first, count):
                        nisa.dma_copy(
                            dst=row_tile_view(out, head, 1, tiles[tile], length),
                            src=zeros[:, 0 : length * d],
                        )
                        yield
        if self._chunk.lse is not None:
            yield from self._clear_lse(self._chunk.lse, later)

    def _clear_lse(self, lse: nl.NkiTensor, groups: list[QGroup]) -> Iterator[None]:
        """-inf for all rows of q_groups that may be left out."""
        nothing = sbuf((lse.shape[0], PARTITIONS))
        nisa.memset(dst=nothing, value=-math.inf, engine=nisa.engine.gpsimd)
        for group in groups:
            heads = slice(group.first_head, group.first_head + group.num_heads)
            for tile in group.row_tiles[: group.num_stored]:
                first = tile * PARTITIONS
                nisa.dma_copy(
                    dst=lse[heads, first : first + PARTITIONS], src=nothing[0 : group.num_heads, :]
                )
                yield

    def _new_softmax(self) -> Softmax:
        """The pipeline of a pass."""
        dtype, numbers = self._chunk.q.dtype, self._given.numbers
        if self._given.mode == "bounded":
            return BoundedSoftmax(dtype, numbers)
        return OnlineSoftmax(dtype, numbers, self._band.cut_distances())

    def _new_work(self, softmax: Softmax, group: QGroup, prior: Prior | None) -> _Work:
        """What a q_group needs on the chip; `prior` is what its pass sees of the cache."""
        chunk = self._chunk
        queries = QueryTiles(group, chunk.q.shape[2], chunk.out.shape[2], chunk.q.dtype, self._band)
        if group.kv_head not in self._keys:
            self._keys[group.kv_head] = ChunkKeys(
                chunk.own, group.kv_head, self._every_valid, queries,
                self._given.numbers.of_products, self._absent,
            )  # fmt: skip
        softmax.add_queries(queries)
        rows = RowFacts(
            q_tile_rows(self._every_valid, group), self._sinks_of(group),
            None if prior is None else prior.value_scale(group.kv_head), chunk.own is None,
        )  # fmt: skip
        stream = ChunkStream(queries, chunk.q, self._keys[group.kv_head], rows.valid)
        return _Work(
            queries, stream, GroupResult(softmax, queries, rows, chunk.out, chunk.lse), rows
        )

    def _sinks_of(self, group: QGroup) -> nl.NkiTensor | None:
        """Sinks [128, H] of a q_group's q_tiles, [128, q_tiles] fp32."""
        sinks = self._every_sink
        if sinks is None:
            return None
        own = sbuf((PARTITIONS, group.num_tiles))
        nisa.tensor_copy(
            dst=own,
            src=sinks.ap(
                [[sinks.shape[1], PARTITIONS], [0, len(group.row_tiles)], [1, group.num_heads]],
                offset=group.first_head,
            ),
        )
        return own

    def _attend(
        self, groups: list[QGroup], extra: list[Iterator[None]], trips: nisa.VirtualRegister | None
    ) -> None:
        """A pass; with `trips`, 0 or 1, so often: its parts are device loops, not nested."""
        softmax = self._new_softmax()
        # Its v_scale, too, concerns a pass only if the pass sees it.
        seen = self._prior if self._sees_prior(groups) else None
        work = [self._new_work(softmax, group, seen) for group in groups]
        prior = None
        if seen is not None:
            prior = PriorPass(softmax, seen, [each.queries for each in work], self._real)
        num_first = [each.group.num_blocks for each in work]
        may_defer = prior is not None and len(work) == 1 and not self._given.in_order
        if may_defer and work[0].rows.value_scale is None:
            num_first = [self._blocks_before_prior(work[0])]

        def first(i: nisa.VirtualRegister | int) -> None:
            self._attend_first(softmax, work, prior, num_first, extra)

        def all_at_once(i: nisa.VirtualRegister | int) -> None:
            first(i)
            last(i)

        def last(i: nisa.VirtualRegister | int) -> None:
            self._attend_last(softmax, work, num_first)
            self._raise_flags(softmax, work)

        if prior is None:
            repeat(trips, all_at_once)
            return
        repeat(trips, first)
        prior.attend()
        repeat(trips, last)

    def _sees_prior(self, groups: list[QGroup]) -> bool:
        """Whether any row of a pass sees any cached key."""
        return any(self._band.sees(group.row_tiles[0] + 1) for group in groups)

    def _attend_first(
        self,
        softmax: Softmax,
        work: list[_Work],
        prior: PriorPass | None,
        num_first: list[int],
        extra: list[Iterator[None]],
    ) -> None:
        """The first q_blocks over the chunk; query columns of all; the window's edge."""
        for each in work:
            each.stream.begin(max(FIRST_LOADS, sampled_blocks(each.queries)))
        ones = sbuf((1, PARTITIONS))
        nisa.memset(dst=ones, value=1.0)
        # ACT loads the table of exp while it waits.
        number = sbuf((1, 1))
        nisa.memset(dst=number, value=0.0, engine=nisa.engine.gpsimd)
        nisa.activation(dst=number, op=nl.exp, data=number)
        if isinstance(softmax, OnlineSoftmax):
            softmax.write_constants(work[0].queries)
        background = softmax.background
        background.add(*(each.stream for each in work))
        others: list[Iterator[object]] = []
        if prior is not None:
            others.append(prior.begin())
            background.add(*others)
        else:
            self._follow(softmax, work)
        for each_extra in extra:
            background.add(each_extra)
        for each, blocks in zip(work, num_first, strict=True):
            stream, queries = each.stream, each.queries
            while stream.columns_ready < min(sampled_blocks(queries), queries.group.num_blocks):
                next(stream)
            if not softmax.is_exact:
                estimate_shift(queries, stream.chunk.kv, softmax, ones)
            for block in range(blocks):
                stream.until(block + 1)
                softmax.attend_blocks(queries, [block], stream.chunk.kv, False)
            softmax.clear_from(queries, blocks if self._chunk.own is not None else 0)
        softmax.drain()
        for each in work:
            for _ in each.stream:
                pass
        for other in others:
            for _ in other:
                pass
        background.clear()
        if prior is not None:
            for each in work:
                if each.rows.value_scale is not None:
                    inverse = sbuf((PARTITIONS, 1))
                    nisa.reciprocal(dst=inverse, data=each.rows.value_scale)
                    each.queries.scale_values(inverse)
            prior.attend_window()

    def _follow(self, softmax: Softmax, work: list[_Work]) -> None:
        """Normalise and store q_blocks as they are complete, beside later ones."""
        results = {id(each.queries): each.result for each in work}
        for each in work:
            each.result.put_into(softmax.background.add())

        def done(queries: QueryTiles, block: int) -> None:
            results[id(queries)].block_done(block)

        softmax.block_done = done

    def _attend_last(self, softmax: Softmax, work: list[_Work], num_first: list[int]) -> None:
        """The other q_blocks over the chunk; the results of all that are left."""
        if softmax.has_no_followers:
            self._follow(softmax, work)
            for each, blocks in zip(work, num_first, strict=True):
                for block in range(blocks):
                    each.result.block_done(block)
        for each, blocks in zip(work, num_first, strict=True):
            later = range(blocks, each.group.num_blocks)
            softmax.attend_blocks(each.queries, later, each.stream.chunk.kv, True)
        softmax.drain()
        for each in work:
            each.result.finish()
        softmax.background.clear()

    def _blocks_before_prior(self, work: _Work) -> int:
        """q_blocks that are computed over the chunk before the prior.

        The others, the last ones, are left for the end: as many as it takes to hide the
        normalisation of all q_tiles on DVE (some 0.3 us each) behind exp on ACT (some 0.43 us per
        kv_tile), as long as those before have a kv_tile for each q_tile, whose preparation they
        hide.
        """
        group, count = work.group, work.stream.chunk.kv.count
        seen = [len(work.queries.seen_of_chunk(block, count)) for block in range(group.num_blocks)]
        block, hidden = group.num_blocks, 0
        while block > 1 and 10 * hidden < 7 * group.num_tiles:
            if sum(seen[: block - 1]) < group.num_tiles:
                break
            block -= 1
            hidden += seen[block]
        return block

    def _raise_flags(self, softmax: Softmax, work: list[_Work]) -> None:
        """Raise the flag of the first head of a q_group that fails its check."""
        if softmax.is_exact:
            return
        for each in work:
            head = each.group.first_head
            own, flag = self._flags[:, head : head + 1], sbuf((1, 1), nl.int32)
            each.result.write_flag(flag)
            nisa.tensor_tensor(dst=own, data1=own, data2=flag, op=nl.maximum)

    def results(self) -> tuple[nl.NkiTensor, ...]:
        """The flags [cores, H] int32 and, if asked for, lse: what a kernel returns after `out`."""
        lse = self._chunk.lse
        return (self.store_flags(),) if lse is None else (self.store_flags(), lse)

    def store_flags(self) -> nl.NkiTensor:
        """Which heads failed the check of the bounded softmax, [cores, H] int32 HBM."""
        core, num_cores = nl.program_id(0), nl.num_programs(0)
        shape = (num_cores, self._flags.shape[1])
        stored = nl.ndarray(shape, dtype=nl.int32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=stored[core : core + 1, :], src=self._flags)
        return stored


def new_lse(q: nl.NkiTensor, with_lse: bool) -> nl.NkiTensor | None:
    """[H, S] fp32 in HBM if asked for."""
    if not with_lse:
        return None
    return nl.ndarray(q.shape[:2], dtype=nl.float32, buffer=nl.shared_hbm)


def repeat(trips: nisa.VirtualRegister | None, body: Body) -> None:
    """A part of the work, as often as a register says; None: once."""
    if trips is None:
        body(0)
    else:
        nl.fori_loop(0, trips, body)
