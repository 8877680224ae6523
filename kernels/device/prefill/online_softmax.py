"""Online softmax of q_groups with an exact row_max.

Queries lie on partitions. An iteration takes a q_tile through up to 16 kv_tiles, 4 of them in a
PSUM bank. Its weights are transposed two iterations later, and multiplied with the values three
iterations later, all in the time of one iteration:

    PE   | Q K n | transposes of n - 2 | Q K n | other transposes of n - 2 | P V n - 3 |
    DVE  |       | row_max of n, bank by bank  | shift of n | weights | acc += P V n - 3 |
    ACT  | exp of n - 1, up to 4 banks | transposed weights | exp of n ...
    Pool |                                     | acc *= exp(old - new row_max) |
         time ->

What a row must not see gets MASKED: a product with a triangle (tiles that are seen in part,
band.py) or of one contraction row (absent cached keys, unless first_key.py stands in for them) adds
it to the scores. The accumulator has the row_sum in its last column, as that of the bounded
softmax.

A full iteration allocates eight PSUM tiles, always in the same order, and keeps none. So an
allocator that goes round the eight banks gives each tile the bank of its forerunner, which has been
read by then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from ...backend import nisa, nl
from ...sizes import FLOOR, MASKED, PARTITIONS, ScoreNumbers
from ..tile_schedule import Q_BLOCK_TILES
from .kv_tiles import PIECE_TILES, KvTiles
from .on_chip import psum_bank, sbuf, transpose
from .query_tiles import QueryTiles
from .softmax_base import Softmax

ITERATION_PIECES = 4
"""Most pieces of an iteration: PSUM banks of scores; the others hold transposes and sums."""

BANK_PIECES = (2, 1, 1)
"""Pieces whose weights are transposed together: 8 kv_tiles of 16-bit columns fill a bank."""

PENDING = 2
"""Iterations between scores and transposes."""

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
    is_last: bool
    """Of the q_tile in this pass."""
    weights: list[nl.NkiTensor]
    """[128, keys of a bank]."""
    transposed: list[nl.NkiTensor]
    correction: nl.NkiTensor
    """[128, 1] fp32, of the accumulator."""
    scores: list[nl.NkiTensor] = field(default_factory=list)
    """Of each piece, until there are weights: an iteration keeps no bank."""
    bias: nl.NkiTensor | None = None
    """[128, 1] fp32, minus the running maximum."""

    def is_same_tile(self, other: "_Iteration") -> bool:
        """Whether both are of one q_tile."""
        return self.queries is other.queries and self.t == other.t

    @property
    def pieces(self) -> list[range]:
        """Its kv_tiles, cut where the pieces of keys are."""
        begin, end = self.tiles.start, self.tiles.stop
        cuts = [begin, *range((begin // PIECE_TILES + 1) * PIECE_TILES, end, PIECE_TILES), end]
        return [range(a, b) for a, b in pairwise(cuts)]

    @property
    def banks(self) -> list[list[range]]:
        """The pieces whose weights share a bank of transposes."""
        pieces = self.pieces
        cuts = [0, *accumulate(BANK_PIECES)]
        return [pieces[a:b] for a, b in pairwise(cuts) if a < len(pieces)]

    @property
    def columns(self) -> list[nl.NkiTensor]:
        """Transposed weights of each kv_tile."""
        return [
            tensor[:, j * PARTITIONS : (j + 1) * PARTITIONS]
            for tensor, pieces in zip(self.transposed, self.banks, strict=False)
            for j in range(sum(map(len, pieces)))
        ]


class OnlineSoftmax(Softmax):
    """The pipeline that fills the accumulators of q_groups."""

    is_exact = True

    def __init__(self, dtype: str, numbers: ScoreNumbers, cut_distances: list[int]) -> None:
        super().__init__(numbers)
        rows = [(PARTITIONS, count * PIECE_TILES * PARTITIONS) for count in BANK_PIECES]
        self._weights = [[sbuf(shape, dtype) for shape in rows] for _ in range(PENDING + 1)]
        self._transposed = [[sbuf(shape, dtype) for shape in rows] for _ in range(2)]
        self._ones = sbuf((1, PARTITIONS), nl.bfloat16)
        square = (PARTITIONS, PARTITIONS)
        self._identity = sbuf(square, nl.bfloat16)
        # MASKED at the keys that a row does not see, for each distance of tiles seen in part.
        self._unseen = {distance: sbuf(square, nl.bfloat16) for distance in cut_distances}
        self._pending: list[_Iteration] = []
        self._transposing: _Iteration | None = None
        self._waiting: _Iteration | None = None
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
            first = block * Q_BLOCK_TILES
            for t in range(first, first + queries.group.tiles_of(block)):
                seen = range(kv.count)
                if kv.first_tile is not None:
                    seen = queries.seen(t, kv.first_tile, kv.count)
                parts = _parts(seen)
                for i, tiles in enumerate(parts):
                    iteration = _Iteration(
                        queries, t, kv, tiles, i == 0 and not add, tiles is parts[-1],
                        self._weights[self._issued % (PENDING + 1)],
                        self._transposed[self._issued % 2], sbuf((PARTITIONS, 1)),
                    )  # fmt: skip
                    self._issued += 1
                    kv.ready(tiles.stop - 1)
                    self._advance(iteration)
                    self._pending.append(iteration)
                    for _ in range(2 if queries.group.num_tiles < SHORT_TILES else 1):
                        self._lead_ns -= self.background.issue() * BACKGROUND_NS

    def _advance(self, new: _Iteration | None) -> None:
        """The first stage of `new`, the others of those before it; None: nothing new comes."""
        transposing = None
        if self._pending and (new is None or len(self._pending) == PENDING):
            transposing = self._pending.pop(0)
        summing, self._transposing = self._transposing, transposing
        waiting = self._waiting
        if new is None or (waiting is not None and waiting.is_same_tile(new)):
            self._weigh_waiting()
        if new is None:
            if transposing is not None:
                self._transpose(transposing, 0)
            self._finish(transposing, summing)
            return
        pieces = new.pieces
        row_max = sbuf((PARTITIONS, len(pieces)))
        scores = []
        for i, piece in enumerate(pieces):
            scores.append(self._scores(new, piece, row_max[:, i : i + 1]))
            if transposing is not None and i == min(1, len(pieces) - 1):
                self._transpose(transposing, 0)
        # exp waits for the shift: DVE makes it before it brings back transposed weights.
        bias = self._move_shift(new, row_max)
        self._finish(transposing, summing)
        self._weigh_waiting()
        new.scores, new.bias = scores, bias
        self._waiting = new
        if not self.numbers.softcap:
            self._weigh_waiting()

    def _finish(self, transposing: _Iteration | None, summing: _Iteration | None) -> None:
        """The rest of the second stage, and the third."""
        if transposing is not None:
            for i in range(1, len(transposing.banks)):
                self._transpose(transposing, i)
        if summing is not None:
            self._add_values(summing)

    def _scores(self, new: _Iteration, piece: range, row_max: nl.NkiTensor) -> nl.NkiTensor:
        """Scores of a piece in PSUM, and their maximum."""
        kv, queries = new.kv, new.queries
        scores = psum_bank()[:, 0 : len(piece) * PARTITIONS]
        first, end = piece.start, piece.stop
        products = [
            (queries.query(new.t, features), kv.keys(first, end, features), scores)
            for features in range(len(queries.columns[0]))
        ]
        mask, unseen = kv.mask(first, end), self._unseen_in(new, piece)
        if not self.numbers.softcap:
            if mask is not None:
                products.append((self._ones, mask, scores))
            products += [(self._identity, tile, scores[:, columns]) for columns, tile in unseen]
        for i, (stationary, moving, dst) in enumerate(products):
            nisa.nc_matmul(dst=dst, stationary=stationary, moving=moving, accumulate=i > 0)
        if self.numbers.softcap:
            scores = self.raw_scores(scores, kv)
            self._mask_sigmoids(scores, mask, unseen)
        self._lead_ns -= vector_ns(scores.shape[1])
        nisa.tensor_reduce(dst=row_max, op=nl.maximum, data=scores, axis=1, keepdims=True)
        return scores

    def _unseen_in(self, new: _Iteration, piece: range) -> list[tuple[slice, nl.NkiTensor]]:
        """Columns of a piece of which rows see a part only, with what is added to their scores."""
        kv = new.kv
        if kv.first_tile is None:
            return []
        distance = new.queries.group.row_tile(new.t) - kv.first_tile
        found = [(j, self._unseen.get(distance - tile)) for j, tile in enumerate(piece)]
        return [
            (slice(j * PARTITIONS, (j + 1) * PARTITIONS), tile)
            for j, tile in found
            if tile is not None
        ]

    def _mask_sigmoids(
        self,
        sigmoids: nl.NkiTensor,  # [128, keys of the piece] SBUF
        mask: nl.NkiTensor | None,  # [1, keys of the piece]
        unseen: list[tuple[slice, nl.NkiTensor]],
    ) -> None:
        """Masks of capped scores: an addition before the cap would be capped, too."""
        self._lead_ns += scalar_ns(sigmoids.shape[1])
        self._lead_ns -= vector_ns(sigmoids.shape[1])
        if mask is not None:
            bank = psum_bank()[:, 0 : sigmoids.shape[1]]
            nisa.nc_matmul(dst=bank, stationary=self._ones, moving=mask, accumulate=False)
            nisa.tensor_tensor(dst=sigmoids, data1=sigmoids, data2=bank, op=nl.add)
        for columns, tile in unseen:
            own = sigmoids[:, columns]
            nisa.tensor_tensor(dst=own, data1=own, data2=tile, op=nl.add)

    def _move_shift(self, new: _Iteration, row_max: nl.NkiTensor) -> nl.NkiTensor:
        """Minus the running maximum, moved by an iteration."""
        self._lead_ns -= 2 * vector_ns(1)
        both = row_max
        if row_max.shape[1] > 1:
            both = sbuf((PARTITIONS, 1))
            nisa.tensor_reduce(dst=both, op=nl.maximum, data=row_max, axis=1, keepdims=True)
        shift = new.queries.neg_max[new.t]
        scale = self.score_scale(new.kv).negative
        if new.is_first:
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

    def _weigh_waiting(self) -> None:
        """Weights: exp of the scores; the correction of the accumulator.

        GpSimd, which has time, keeps the new shift. With a cap weights are made an iteration after
        the scores, as ACT waits for DVE.
        """
        new, self._waiting = self._waiting, None
        if new is None:
            return
        scores, new.scores, bias = new.scores, [], new.bias
        assert bias is not None, "scores come before weights"
        ends = [end for pieces in new.banks for end in accumulate(map(len, pieces))]
        banks = [bank for bank, pieces in enumerate(new.banks) for _ in pieces]
        for own, bank, end in zip(scores, banks, ends, strict=True):
            columns = own.shape[1]
            self._lead_ns += scalar_ns(columns)
            nisa.activation(
                dst=new.weights[bank][:, end * PARTITIONS - columns : end * PARTITIONS], op=nl.exp,
                data=own, bias=bias, scale=self.score_scale(new.kv).positive,
            )  # fmt: skip
        if not new.is_first:
            shift = new.queries.neg_max[new.t]
            self._lead_ns += scalar_ns(1)
            nisa.activation(dst=new.correction, op=nl.exp, data=shift, bias=bias, scale=-1.0)
            nisa.tensor_copy(dst=shift, src=bias, engine=nisa.engine.gpsimd)

    def _transpose(self, iteration: _Iteration, i: int) -> None:
        """Transpose a bank of an iteration's weights.

        ACT copies every bank but the last back to SBUF; DVE copies the last one while it would
        otherwise wait for scores. If there is one bank only, the less busy of them copies it.
        """
        banks = iteration.banks
        columns = sum(map(len, banks[i])) * PARTITIONS
        engine = nisa.engine.scalar
        if i == len(banks) - 1 and (i > 0 or self._lead_ns > 0):
            engine = nisa.engine.vector
            self._lead_ns -= vector_ns(columns // 2)
        else:
            self._lead_ns += scalar_ns(columns)
        weights = iteration.weights[i]
        transpose(
            [weights[:, j : j + PARTITIONS] for j in range(0, columns, PARTITIONS)],
            iteration.transposed[i][:, 0:columns],
            engine,
        )

    def _add_values(self, old: _Iteration) -> None:
        """P V, [128, d + 1] fp32 in PSUM, joins the corrected accumulator."""
        queries, t = old.queries, old.t
        acc = queries.accumulator(t)
        if not old.is_first:
            nisa.tensor_tensor(
                dst=acc, data1=acc, data2=old.correction.ap([[1, PARTITIONS], [0, acc.shape[1]]]),
                op=nl.multiply, engine=nisa.engine.gpsimd,
            )  # fmt: skip
        total = psum_bank()[:, 0 : acc.shape[1]]
        for own, tile in zip(old.columns, old.tiles, strict=True):
            nisa.nc_matmul(
                dst=total, stationary=own, moving=old.kv.values(tile),
                accumulate=tile > old.tiles.start,
            )  # fmt: skip
        if old.is_first:
            self._lead_ns += scalar_ns(acc.shape[1])
            nisa.tensor_copy(dst=acc, src=total, engine=nisa.engine.scalar)
        else:
            self._lead_ns -= vector_ns(acc.shape[1])
            nisa.tensor_tensor(dst=acc, data1=total, data2=acc, op=nl.add)
        block = t // Q_BLOCK_TILES
        last = block * Q_BLOCK_TILES + queries.group.tiles_of(block) - 1
        if old.is_last and t == last:
            self.block_done(queries, block)

    def _in_flight(self) -> list[_Iteration]:
        return self._pending + ([] if self._transposing is None else [self._transposing])

    def release(self, kv: KvTiles) -> None:
        """Finish the iterations in flight up to the last one that reads these kv_tiles."""
        while any(iteration.kv.pieces is kv.pieces for iteration in self._in_flight()):
            self._advance(None)

    def drain(self) -> None:
        """Finish every iteration; the next one starts the rings of buffers anew."""
        while self._in_flight():
            self._advance(None)
        self._issued = self._num_sigmoids = 0
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


def _parts(seen: range) -> list[range]:
    """The kv_tiles that a q_tile sees, in parts of about as many pieces."""
    begin, stop = seen.start // PIECE_TILES, -(-seen.stop // PIECE_TILES)
    count = -(-(stop - begin) // ITERATION_PIECES) if seen else 0
    cuts = [(begin + (stop - begin) * i // count) * PIECE_TILES for i in range(1, count)]
    return [range(a, b) for a, b in pairwise([seen.start, *cuts, seen.stop])] if seen else []


def scalar_ns(columns: int) -> float:
    """Time of an ACT instruction: a column per cycle of 1.2 GHz, and 64 more."""
    return (columns + 64) / 1.2


def vector_ns(columns: int) -> float:
    """Time of a DVE instruction: a column per cycle of 0.96 GHz, and 64 more."""
    return (columns + 64) / 0.96
