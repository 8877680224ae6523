"""Bounded softmax of q_groups: one shift for all of their scores, no row_max.

Keys lie on partitions, so a weight tile is the stationary operand of P V as it comes out of exp: no
weight is transposed, nothing is rescaled. An iteration is a kv_tile against 512 queries, a q_block:

    PE   | Q K 0 | Q K 1 | Q K 2 | Q K 3 | Q K 4   P V 0 | Q K 5   P V 1 | ...
    ACT  |       | exp 0 | exp 1 | exp 2 | exp 3         | exp 4         | ...
    Pool |               | cut 0 | (where a tile is seen in part)
    DVE  |   (keys and queries of later iterations, sums of the q_block before: acc += P V)
         time ->

P V of a q_block adds up in four PSUM banks, one for each q_tile, over all kv_tiles that the pass
has; scores take turns in the other four.

The shift c of a q_group is the largest of a sample of its scores minus HEADROOM
(shift_estimate.py). It is an estimate: other scores may be larger, other rows may see smaller ones
only. What makes a result right is the check on the row_sum l of every real row,

    SMALLEST_SUM <= l <= LARGEST_SUM, its output is finite,
    and l >= SAFE_SUM or the values of the accumulator add up to SMALLEST_RESULT at least:

every weight of a row has the one factor exp(-c), so what exp flushed to zero is below
N * exp(-87) of a sum that is at least exp(-60), and an overflow shows as infinity or NaN. Products
of such a weight with a small value may be flushed, too; the third condition (result.py) bounds what
is lost against what is there. A row that fails raises the flag of its q_group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...backend import nisa, nl
from ...sizes import MATMUL_COLUMNS, PARTITIONS, ScoreNumbers
from ..tile_schedule import Q_BLOCK_TILES
from .kv_tiles import KvTiles
from .on_chip import psum_bank, sbuf
from .query_tiles import QueryTiles
from .softmax_base import Softmax

LAG = 6
"""Iterations by which P V trails the scores, so that PE never waits for exp."""

WEIGHT_BUFFERS = LAG + 3
"""Weight tiles in SBUF."""

SCALAR_BLOCKS = 4
"""q_blocks of a chunk whose exp takes less time than what DVE has to do for them."""


@dataclass
class _Iteration:
    """A kv_tile against a q_block."""

    queries: QueryTiles
    block: int
    kv: KvTiles
    tile: int
    begin: int
    """First q_tile of the q_block that sees it, and the one after the last."""
    end: int
    weights: nl.NkiTensor
    is_first: bool
    """Begins the q_block's pass over these kv_tiles."""
    is_last: bool
    add: bool
    """The pass adds to the accumulator instead of setting it."""


class BoundedSoftmax(Softmax):
    """The pipeline that fills the accumulators of q_groups."""

    is_exact = False

    def __init__(self, dtype: str, numbers: ScoreNumbers) -> None:
        super().__init__(numbers)
        shape = (PARTITIONS, MATMUL_COLUMNS)
        self._weights = [sbuf(shape, dtype) for _ in range(WEIGHT_BUFFERS)]
        self._issued = 0
        self._waiting: tuple[_Iteration, nl.NkiTensor] | None = None
        self._in_flight: list[_Iteration] = []
        self._sums: dict[int, nl.NkiTensor] = {}

    def add_queries(self, queries: QueryTiles) -> None:
        """One shift for all q_tiles, to be estimated."""
        queries.neg_max = [sbuf((PARTITIONS, 1))] * queries.group.num_tiles

    def clear_from(self, queries: QueryTiles, block: int) -> None:
        """Zero the accumulators of this q_block and those after it."""
        for acc in queries.acc[block:]:
            nisa.memset(dst=acc, value=0.0, engine=nisa.engine.gpsimd)

    def attend_blocks(
        self, queries: QueryTiles, blocks: Sequence[int], kv: KvTiles, add: bool
    ) -> None:
        """q_blocks over the kv_tiles that they see; sets their accumulators, or adds to them."""
        for block in blocks:
            seen = self._seen(queries, block, kv)
            for i, (tile, begin, end) in enumerate(seen):
                kv.ready(tile)
                weights = self._weights[self._issued % WEIGHT_BUFFERS]
                self._issue(
                    _Iteration(
                        queries, block, kv, tile, begin, end, weights, i == 0,
                        i + 1 == len(seen), add,
                    )
                )  # fmt: skip

    def _seen(self, queries: QueryTiles, block: int, kv: KvTiles) -> list[tuple[int, int, int]]:
        """kv_tiles that a q_block sees, each with the q_tiles of it that do: begin, end."""
        num = queries.group.tiles_of(block)
        if kv.first_tile is None:
            return [(tile, 0, num) for tile in range(kv.count)]
        first = block * Q_BLOCK_TILES
        seen = [queries.seen(first + i, kv.first_tile, kv.count) for i in range(num)]
        found = []
        for tile in range(kv.count):
            who = [i for i, tiles in enumerate(seen) if tile in tiles]
            if who:
                found.append((tile, who[0], who[-1] + 1))
        return found

    def _issue(self, iteration: _Iteration) -> None:
        """Scores and weights of an iteration; P V of the iteration LAG places before."""
        scores = psum_bank()
        begin, end = iteration.begin * PARTITIONS, iteration.end * PARTITIONS
        columns = iteration.queries.columns[iteration.block]
        for part, queries in enumerate(columns):
            nisa.nc_matmul(
                dst=scores[:, begin:end],
                stationary=iteration.kv.keys(iteration.tile, iteration.tile + 1, part),
                moving=queries[:, begin:end], accumulate=part > 0,
            )  # fmt: skip
        raw = self.raw_scores(scores[:, begin:end], iteration.kv)
        self._weigh_waiting()
        self._waiting = (iteration, raw)
        if not self.numbers.softcap:
            self._weigh_waiting()
        self._issued += 1
        self._in_flight.append(iteration)
        if len(self._in_flight) > LAG:
            self._retire()
        self.background.issue()

    def _weigh_waiting(self) -> None:
        """Weights of the newest iteration: with a cap an iteration later, as ACT waits for DVE."""
        if self._waiting is None:
            return
        iteration, raw = self._waiting
        self._waiting = None
        nisa.activation(
            dst=iteration.weights[:, iteration.begin * PARTITIONS : iteration.end * PARTITIONS],
            op=nl.exp, data=raw, bias=iteration.queries.neg_max[0],
            scale=self.score_scale(iteration.kv).positive,
        )  # fmt: skip
        self._cut(iteration)

    def _cut(self, iteration: _Iteration) -> None:
        """Zero the weights of keys that a row does not see."""
        if iteration.kv.first_tile is None:
            return
        band = iteration.queries.band
        kv_tile = iteration.kv.first_tile + iteration.tile
        first = iteration.block * Q_BLOCK_TILES
        distances = [
            iteration.queries.group.row_tile(first + i) - kv_tile
            for i in range(iteration.begin, iteration.end)
        ]
        i = 0
        while i < len(distances):
            run = i + 1
            while run < len(distances) and distances[run] == distances[i]:
                run += 1
            if band.is_cut(distances[i]):
                begin, end = (
                    (iteration.begin + i) * PARTITIONS,
                    (iteration.begin + run) * PARTITIONS,
                )
                band.select(iteration.weights[:, begin:end], distances[i], True, 0.0)
            i = run

    def _retire(self) -> None:
        """P V of the oldest iteration in flight; after a q_block's last one, its accumulator."""
        iteration = self._in_flight.pop(0)
        queries = iteration.queries
        width = queries.value_dim + 1
        if iteration.is_first:
            self._sums = {}
        for t in range(iteration.begin, iteration.end):
            is_first = t not in self._sums
            if is_first:
                self._sums[t] = psum_bank()
            nisa.nc_matmul(
                dst=self._sums[t][:, 0:width],
                stationary=iteration.weights[:, t * PARTITIONS : (t + 1) * PARTITIONS],
                moving=iteration.kv.values(iteration.tile), accumulate=not is_first,
            )  # fmt: skip
        if iteration.is_last:
            for t, total in self._sums.items():
                acc = queries.accumulator(iteration.block * Q_BLOCK_TILES + t)
                if iteration.add:
                    nisa.tensor_tensor(dst=acc, data1=total[:, 0:width], data2=acc, op=nl.add)
                else:
                    nisa.tensor_copy(
                        dst=acc, src=total[:, 0:width], engine=self._idle_engine(iteration.block)
                    )
            self._sums = {}
            self.block_done(queries, iteration.block)

    def _idle_engine(self, block: int) -> nisa.engine:
        """Who brings results of a chunk's q_block to SBUF: ACT in the first, short ones."""
        return nisa.engine.scalar if block < SCALAR_BLOCKS else nisa.engine.vector

    def release(self, kv: KvTiles) -> None:
        """P V of the iterations in flight up to the last one that reads these kv_tiles."""
        self._weigh_waiting()
        while any(iteration.kv.pieces is kv.pieces for iteration in self._in_flight):
            self._retire()

    def drain(self) -> None:
        """P V of every iteration in flight; the next iteration starts the ring of weights anew."""
        self._weigh_waiting()
        while self._in_flight:
            self._retire()
        self._issued = self._num_sigmoids = 0

    def weigh_sinks(
        self, queries: QueryTiles, sinks: nl.NkiTensor, tiles: range, weights: nl.NkiTensor
    ) -> None:
        """Weights of the sinks of some q_tiles."""
        own = slice(tiles.start, tiles.stop)
        nisa.activation(dst=weights[:, own], op=nl.exp, data=sinks[:, own], bias=queries.neg_max[0])
