"""Online softmax of q_groups with an exact row_max.

Queries lie on partitions. An iteration takes a q_tile through up to 16 kv_tiles, 4 of them in a
PSUM bank, in three stages; the second and third one follow some iterations behind the first:

    PE   | Q K n, 4 banks, transposes of iteration n - 2   | P V n - 2 ...
    DVE  | row_max of each bank | new shift | half of the transposed weights | acc += P V n - 3
    ACT  |                                  | exp, 4 banks | other half of the transposed weights
    Pool | acc of iteration n - 2 *= exp(old - new row_max)
         time ->

What a row must not see gets MASKED: a product with a triangle (tiles that are seen in part,
band.py) or of one contraction row (absent cached keys, unless first_key.py stands in for them) adds
it to the scores. The accumulator has the row_sum in its last column, as that of the bounded
softmax. ACT and DVE, the busiest engines, are kept equally busy by the choice of who brings back
weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...backend import nisa, nl
from ...sizes import FLOOR, MASKED, PARTITIONS
from ..tile_schedule import Q_BLOCK_TILES
from .kv_tiles import PIECE_TILES, KvTiles
from .on_chip import psum_bank, sbuf, transpose
from .query_tiles import QueryTiles
from .softmax_base import Softmax

ITERATION_TILES = 16
"""kv_tiles of an iteration: four PSUM banks of scores, four others hold transposes and sums."""

PENDING = 2
"""Iterations between the first and the second stage."""

AHEAD = 2
"""Pieces of transposed weights between a transpose and its use."""

SHORT_TILES = 8
"""q_tiles below which two portions of other work are issued beside each iteration."""

BACKGROUND_NS = 400.0
"""Time of a portion of other work on DVE, about."""


@dataclass
class _Iteration:
    """One q_tile against consecutive kv_tiles."""

    queries: QueryTiles
    t: int
    kv: KvTiles
    tiles: range
    is_first: bool
    """Of the q_tile: there is no accumulator yet."""
    ends_pass: bool
    weights: list[nl.NkiTensor]
    transposed: list[nl.NkiTensor]
    correction: nl.NkiTensor
    """[128, 1] fp32, of the accumulator."""
    work: Iterator[None]
    """The second and the third stage."""

    @property
    def pieces(self) -> list[range]:
        """Its kv_tiles, cut where the pieces of keys are."""
        begin, end = self.tiles.start, self.tiles.stop
        cuts = [begin, *range((begin // PIECE_TILES + 1) * PIECE_TILES, end, PIECE_TILES), end]
        return [range(a, b) for a, b in pairwise(cuts)]


class OnlineSoftmax(Softmax):
    """The pipeline that fills the accumulators of q_groups."""

    is_exact = True

    def __init__(self, dtype: str, scale: float, cut_distances: list[int]) -> None:
        super().__init__(scale)
        shape = (PARTITIONS, PIECE_TILES * PARTITIONS)
        pieces = ITERATION_TILES // PIECE_TILES + 1
        self._weights = [[sbuf(shape, dtype) for _ in range(pieces)] for _ in range(PENDING + 1)]
        self._transposed = [[sbuf(shape, dtype) for _ in range(pieces)] for _ in range(2)]
        self._corrections = [sbuf((PARTITIONS, 1)) for _ in range(PENDING + 2)]
        self._ones = sbuf((1, PARTITIONS), nl.bfloat16)
        square = (PARTITIONS, PARTITIONS)
        self._identity = sbuf(square, nl.bfloat16)
        # MASKED at the keys that a row does not see, for each distance of tiles seen in part.
        self._unseen = {distance: sbuf(square, nl.bfloat16) for distance in cut_distances}
        self._pending: list[_Iteration] = []
        self._summing: list[_Iteration] = []
        self._issued = 0
        # By how much more time ACT is busy than DVE.
        self._lead_ns = 0.0

    def add_queries(self, queries: QueryTiles) -> None:
        """A running maximum for each q_tile."""
        queries.neg_max = [sbuf((PARTITIONS, 1)) for _ in range(queries.group.num_tiles)]

    def clear_from(self, queries: QueryTiles, block: int) -> None:
        """Zero accumulators, and shifts of scores that count as none."""
        for acc in queries.acc[block:]:
            nisa.memset(dst=acc, value=0.0, engine=nisa.engine.gpsimd)
        for shift in queries.neg_max[block * Q_BLOCK_TILES :]:
            nisa.memset(dst=shift, value=-self.scale * FLOOR, engine=nisa.engine.gpsimd)

    def write_constants(self, queries: QueryTiles) -> None:
        """Ones, the identity, and what is added to tiles that are seen in part."""
        nisa.memset(dst=self._ones, value=1.0, engine=nisa.engine.gpsimd)
        nisa.memset(dst=self._identity, value=1.0, engine=nisa.engine.gpsimd)
        nisa.affine_select(
            dst=self._identity, pattern=[[1, PARTITIONS]], channel_multiplier=-1,
            on_true_tile=self._identity, on_false_value=0.0, cmp_op=nl.equal,
        )  # fmt: skip
        for distance, tile in self._unseen.items():
            nisa.memset(dst=tile, value=0.0, engine=nisa.engine.gpsimd)
            queries.band.select(tile, distance, False, MASKED)

    def attend_blocks(
        self, queries: QueryTiles, blocks: Sequence[int], kv: KvTiles, add: bool
    ) -> None:
        """q_blocks over the kv_tiles that they see; `add`: they have accumulators."""
        for block in blocks:
            for t in range(
                block * Q_BLOCK_TILES, block * Q_BLOCK_TILES + queries.group.tiles_of(block)
            ):
                seen = range(kv.count)
                if kv.first_tile is not None:
                    seen = queries.seen(t, kv.first_tile, kv.count)
                self._attend_tile(queries, t, kv, seen, add)

    def _attend_tile(
        self, queries: QueryTiles, t: int, kv: KvTiles, seen: range, add: bool
    ) -> None:
        """A q_tile over some kv_tiles, in iterations of about the same length."""
        begin = seen.start
        num_iterations = -(-len(seen) // ITERATION_TILES)
        for left in range(num_iterations, 0, -1):
            # A short iteration has the latencies of a long one.
            end = begin + -(-(seen.stop - begin) // left)
            kv.ready(end - 1)
            is_first = begin == seen.start and not add
            self._issue(queries, t, kv, range(begin, end), (is_first, left == 1))
            begin = end

    def _issue(
        self, queries: QueryTiles, t: int, kv: KvTiles, tiles: range, edges: tuple[bool, bool]
    ) -> None:
        """The first stage of an iteration, and the others of the one PENDING places before."""
        iteration = _Iteration(
            queries, t, kv, tiles, *edges, self._weights[self._issued % (PENDING + 1)],
            self._transposed[self._issued % 2],
            self._corrections[self._issued % len(self._corrections)], iter(()),
        )  # fmt: skip
        iteration.work = self._multiply(iteration)
        self._issued += 1
        old = self._pending.pop(0) if len(self._pending) == PENDING else None
        pieces = iteration.pieces
        row_max = sbuf((PARTITIONS, len(pieces)))
        scores = []
        for i, piece in enumerate(pieces):
            scores.append(self._scores(iteration, piece, row_max[:, i : i + 1]))
            if old is not None and i == min(1, len(pieces) - 1):
                self._advance(old)
        # exp waits for the shift: DVE makes it before it brings back transposed weights.
        bias = self._move_shift(iteration, row_max)
        if old is not None:
            next(old.work)
            self._summing.append(old)
        for own, weights in zip(scores, iteration.weights, strict=False):
            self._lead_ns += scalar_ns(own.shape[1])
            nisa.activation(
                dst=weights[:, 0 : own.shape[1]], op=nl.exp, data=own, bias=bias,
                scale=kv.scale.positive,
            )  # fmt: skip
        self._correct(iteration, bias)
        self._pending.append(iteration)
        for _ in range(2 if queries.group.num_tiles < SHORT_TILES else 1):
            self._lead_ns -= self.background.issue() * BACKGROUND_NS

    def _advance(self, iteration: _Iteration) -> None:
        """The first pieces of its weights, then the last products of the iteration before.

        In this order, as PE waits for transposed weights longer than for a bank.
        """
        next(iteration.work)
        for other in self._summing:
            for _ in other.work:
                pass
        self._summing = []

    def _scores(self, iteration: _Iteration, piece: range, row_max: nl.NkiTensor) -> nl.NkiTensor:
        """Scores of a piece of the kv_tiles in PSUM, and their maximum."""
        kv = iteration.kv
        scores = psum_bank()[:, 0 : len(piece) * PARTITIONS]
        first, end = piece.start, piece.stop
        products = [
            (iteration.queries.query(iteration.t, part), kv.keys(first, end, part), scores)
            for part in range(len(iteration.queries.columns[0]))
        ]
        mask = kv.mask(first, end)
        if mask is not None:
            products.append((self._ones, mask, scores))
        if kv.first_tile is not None:
            row_tile = iteration.queries.group.row_tile(iteration.t)
            for j, tile in enumerate(piece):
                unseen = self._unseen.get(row_tile - kv.first_tile - tile)
                if unseen is not None:
                    own = scores[:, j * PARTITIONS : (j + 1) * PARTITIONS]
                    products.append((self._identity, unseen, own))
        for i, (stationary, moving, dst) in enumerate(products):
            nisa.nc_matmul(dst=dst, stationary=stationary, moving=moving, accumulate=i > 0)
        self._lead_ns -= vector_ns(scores.shape[1])
        nisa.tensor_reduce(dst=row_max, op=nl.maximum, data=scores, axis=1, keepdims=True)
        return scores

    def _move_shift(self, iteration: _Iteration, row_max: nl.NkiTensor) -> nl.NkiTensor:
        """Minus the running maximum, moved by an iteration."""
        self._lead_ns -= 2 * vector_ns(1)
        both = row_max
        if row_max.shape[1] > 1:
            both = sbuf((PARTITIONS, 1))
            nisa.tensor_reduce(dst=both, op=nl.maximum, data=row_max, axis=1, keepdims=True)
        shift = iteration.queries.neg_max[iteration.t]
        scale = iteration.kv.scale.negative
        if iteration.is_first:
            nisa.tensor_scalar(
                dst=shift, data=both, op0=nl.maximum, operand0=FLOOR, op1=nl.multiply,
                operand1=scale,
            )  # fmt: skip
            return shift
        moved = sbuf((PARTITIONS, 1))
        nisa.tensor_scalar(
            dst=moved, data=both, op0=nl.multiply, operand0=scale, op1=nl.minimum, operand1=shift
        )
        return moved

    def _correct(self, iteration: _Iteration, moved: nl.NkiTensor) -> None:
        """The correction of the accumulator; GpSimd, which has time, keeps the new shift."""
        if not iteration.is_first:
            shift = iteration.queries.neg_max[iteration.t]
            self._lead_ns += scalar_ns(1)
            nisa.activation(dst=iteration.correction, op=nl.exp, data=shift, bias=moved, scale=-1.0)
            nisa.tensor_copy(dst=shift, src=moved, engine=nisa.engine.gpsimd)

    def _multiply(self, iteration: _Iteration) -> Iterator[None]:
        """The second stage up to the second yield, then the third.

        Transposes the weights piece by piece, each with P V of the piece AHEAD places before; at
        last adds the sum to the accumulator.
        """
        pieces = iteration.pieces
        width = iteration.queries.d + 1
        acc = iteration.queries.accumulator(iteration.t)
        for i in range(min(AHEAD, len(pieces))):
            self._transpose(iteration, i, len(pieces[i]))
        yield
        if not iteration.is_first:
            nisa.tensor_tensor(
                dst=acc, data1=acc, data2=iteration.correction.ap([[1, PARTITIONS], [0, width]]),
                op=nl.multiply, engine=nisa.engine.gpsimd,
            )  # fmt: skip
        total = psum_bank()[:, 0:width]
        for i in range(AHEAD, len(pieces)):
            self._transpose(iteration, i, len(pieces[i]))
            self._add_values(iteration, i - AHEAD, total)
        yield
        for i in range(max(0, len(pieces) - AHEAD), len(pieces)):
            self._add_values(iteration, i, total)
        if iteration.is_first:
            self._lead_ns += scalar_ns(width)
            nisa.tensor_copy(dst=acc, src=total, engine=nisa.engine.scalar)
        else:
            self._lead_ns -= vector_ns(width)
            nisa.tensor_tensor(dst=acc, data1=total, data2=acc, op=nl.add)
        block = iteration.t // Q_BLOCK_TILES
        last = block * Q_BLOCK_TILES + iteration.queries.group.tiles_of(block) - 1
        if iteration.ends_pass and iteration.t == last:
            self.block_done(iteration.queries, block)

    def _transpose(self, iteration: _Iteration, i: int, tiles: int) -> None:
        """Transpose a piece of an iteration's weights; ACT brings them back, or DVE if less busy.

        Of two pieces in a row DVE takes one at most: so both work at once.
        """
        engine = nisa.engine.scalar
        columns = tiles * PARTITIONS
        if i % 2 == 0 and self._lead_ns > 0:
            engine = nisa.engine.vector
            self._lead_ns -= vector_ns(columns // 2)
        else:
            self._lead_ns += scalar_ns(columns)
        weights = iteration.weights[i]
        transpose(
            [weights[:, j * PARTITIONS : (j + 1) * PARTITIONS] for j in range(tiles)],
            iteration.transposed[i][:, 0:columns],
            engine,
        )

    def _add_values(self, iteration: _Iteration, i: int, total: nl.NkiTensor) -> None:
        """P V of a piece."""
        for j, tile in enumerate(iteration.pieces[i]):
            nisa.nc_matmul(
                dst=total,
                stationary=iteration.transposed[i][:, j * PARTITIONS : (j + 1) * PARTITIONS],
                moving=iteration.kv.values(tile), accumulate=i + j > 0,
            )  # fmt: skip

    def release(self, kv: KvTiles) -> None:
        """Finish the iterations in flight up to the last one that reads these kv_tiles."""
        while any(
            iteration.kv.pieces is kv.pieces for iteration in [*self._pending, *self._summing]
        ):
            self._retire()

    def _retire(self) -> None:
        """Take the oldest iteration in flight a stage further."""
        if not self._pending:
            for iteration in self._summing:
                for _ in iteration.work:
                    pass
            self._summing = []
            return
        iteration = self._pending.pop(0)
        self._advance(iteration)
        next(iteration.work)
        self._summing.append(iteration)

    def drain(self) -> None:
        """Finish every iteration; the next one starts the rings of buffers anew."""
        while self._pending or self._summing:
            self._retire()
        self._issued = 0
        self._lead_ns = 0.0

    def weigh_sinks(
        self, queries: QueryTiles, sinks: nl.NkiTensor, tiles: range, weights: nl.NkiTensor
    ) -> None:
        """Weights of the sinks of some q_tiles."""
        for t in tiles:
            nisa.activation(
                dst=weights[:, t : t + 1], op=nl.exp, data=sinks[:, t : t + 1],
                bias=queries.neg_max[t],
            )  # fmt: skip


def scalar_ns(columns: int) -> float:
    """Time of an ACT instruction: a column per cycle of 1.2 GHz, and 64 more."""
    return (columns + 64) / 1.2


def vector_ns(columns: int) -> float:
    """Time of a DVE instruction: a column per cycle of 0.96 GHz, and 64 more."""
    return (columns + 64) / 0.96
