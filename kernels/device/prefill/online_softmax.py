"""Online softmax of q_groups with an exact row_max.

Queries lie on partitions. An iteration takes one q_tile through up to 16 kv_tiles, 4 of them in a
PSUM bank, or two q_tiles that see fewer. Its weights are transposed two iterations later, and
multiplied with the values three iterations later, all in the time of one iteration:

    PE   | Q K n | transpose 2 banks of n - 2 | Q K n | P V n - 3 | transpose the others of n - 2 |
    DVE  | row_max of each bank of n         | new shift of n | weights | acc += P V n - 3 |
    ACT  | exp of n - 1, 4 banks | transposed weights back to SBUF      | exp of n ...
    Pool | acc *= exp(old - new row_max)
         time ->

What a row must not see gets MASKED: a product with a triangle (tiles that are seen in part,
band.py) or of one contraction row (absent cached keys, unless first_key.py stands in for them) adds
it to the scores. The accumulator has the row_sum in its last column, as that of the bounded
softmax.

An iteration takes its PSUM tiles in the same order as the one before, eight of them, and holds none
beyond its end: so each finds the bank of its forerunner, whose reader is done by then.
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

ITERATION_PIECES = 4
"""Most pieces of an iteration: PSUM banks of scores; the others hold transposes and sums."""

ITERATION_PARTS = 2
"""Most q_tiles of an iteration, each with a PSUM bank of sums."""

BANK_PIECES = (2, 1, 1)
"""Pieces whose weights are transposed together: 8 kv_tiles of 16-bit columns fill a bank."""

PENDING = 2
"""Iterations between scores and transposes."""

SHORT_TILES = 8
"""q_tiles below which two portions of other work are issued beside each iteration."""

BACKGROUND_NS = 400.0
"""Time of a portion of other work on DVE, about."""


@dataclass
class _Part:
    """One q_tile against consecutive kv_tiles."""

    queries: QueryTiles
    t: int
    kv: KvTiles
    tiles: range
    is_first: bool
    """Of the q_tile: there is no accumulator yet."""
    is_last: bool
    """Of the q_tile in this pass."""
    correction: nl.NkiTensor
    """[128, 1] fp32, of the accumulator."""

    @property
    def pieces(self) -> list[range]:
        """Its kv_tiles, cut where the pieces of keys are."""
        begin, end = self.tiles.start, self.tiles.stop
        cuts = [begin, *range((begin // PIECE_TILES + 1) * PIECE_TILES, end, PIECE_TILES), end]
        return [range(a, b) for a, b in pairwise(cuts)]


@dataclass
class _Iteration:
    """What goes through the stages together."""

    parts: list[_Part]
    weights: list[nl.NkiTensor]
    transposed: list[nl.NkiTensor]

    @property
    def banks(self) -> list[int]:
        """kv_tiles of each bank of transposed weights."""
        sizes = [len(piece) for part in self.parts for piece in part.pieces]
        banks = []
        for count in BANK_PIECES:
            banks.append(sum(sizes[:count]))
            sizes = sizes[count:]
        return [size for size in banks if size]

    def columns(self, tensors: list[nl.NkiTensor]) -> Iterator[nl.NkiTensor]:
        """Where each kv_tile lies in `weights` or in `transposed`."""
        for tensor, size in zip(tensors, self.banks, strict=False):
            for j in range(size):
                yield tensor[:, j * PARTITIONS : (j + 1) * PARTITIONS]


class OnlineSoftmax(Softmax):
    """The pipeline that fills the accumulators of q_groups."""

    is_exact = True

    def __init__(self, dtype: str, scale: float, cut_distances: list[int]) -> None:
        super().__init__(scale)
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
        parts: list[_Part] = []
        for block in blocks:
            first = block * Q_BLOCK_TILES
            for t in range(first, first + queries.group.tiles_of(block)):
                seen = range(kv.count)
                if kv.first_tile is not None:
                    seen = queries.seen(t, kv.first_tile, kv.count)
                for part in _parts(queries, t, kv, seen, add):
                    num_pieces = sum(len(other.pieces) for other in [*parts, part])
                    if num_pieces > ITERATION_PIECES or len(parts) == ITERATION_PARTS:
                        self._issue(parts)
                        parts = []
                    parts.append(part)
        if parts:
            self._issue(parts)

    def _issue(self, parts: list[_Part]) -> None:
        """Scores and weights of an iteration, and the later stages of those before it."""
        iteration = _Iteration(
            parts, self._weights[self._issued % (PENDING + 1)], self._transposed[self._issued % 2]
        )
        self._issued += 1
        parts[0].kv.ready(max(part.tiles.stop for part in parts) - 1)
        self._advance(iteration)
        self._pending.append(iteration)
        for _ in range(2 if parts[0].queries.group.num_tiles < SHORT_TILES else 1):
            self._lead_ns -= self.background.issue() * BACKGROUND_NS

    def _advance(self, iteration: _Iteration | None) -> None:
        """Every stage once, the first one for `iteration`; None: nothing new comes."""
        transposing = None
        if iteration is None or len(self._pending) == PENDING:
            transposing = self._pending.pop(0) if self._pending else None
        early = transposing
        summing, self._transposing = self._transposing, transposing
        exps: list[tuple[_Part, nl.NkiTensor, nl.NkiTensor]] = []
        biases = []
        parts = [] if iteration is None else iteration.parts
        last = min(1, sum(len(part.pieces) for part in parts) - 1)
        for part in parts:
            scores = []
            row_max = sbuf((PARTITIONS, len(part.pieces)))
            for i, piece in enumerate(part.pieces):
                scores.append(self._scores(part, piece, row_max[:, i : i + 1]))
                if early is not None and len(exps) + i == last:
                    self._transpose(early, 0)
                    early = None
            # exp waits for the shift: DVE makes it before it brings back transposed weights.
            biases.append((part, self._move_shift(part, row_max)))
            exps += [(*biases[-1], own) for own in scores]
        if early is not None:
            self._transpose(early, 0)
        if transposing is not None:
            for i in range(1, len(transposing.banks)):
                self._transpose(transposing, i)
        if summing is not None:
            totals = self._multiply(summing)
            for part, total in zip(summing.parts, totals, strict=True):
                self._add_total(part, total)
        if iteration is not None:
            self._weigh(iteration, exps)
        for part, bias in biases:
            self._correct(part, bias)

    def _scores(self, part: _Part, piece: range, row_max: nl.NkiTensor) -> nl.NkiTensor:
        """Scores of a piece in PSUM, and their maximum."""
        kv, queries = part.kv, part.queries
        scores = psum_bank()[:, 0 : len(piece) * PARTITIONS]
        first, end = piece.start, piece.stop
        products = [
            (queries.query(part.t, features), kv.keys(first, end, features), scores)
            for features in range(len(queries.columns[0]))
        ]
        mask = kv.mask(first, end)
        if mask is not None:
            products.append((self._ones, mask, scores))
        if kv.first_tile is not None:
            row_tile = queries.group.row_tile(part.t)
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

    def _move_shift(self, part: _Part, row_max: nl.NkiTensor) -> nl.NkiTensor:
        """Minus the running maximum, moved by a part."""
        self._lead_ns -= 2 * vector_ns(1)
        both = row_max
        if row_max.shape[1] > 1:
            both = sbuf((PARTITIONS, 1))
            nisa.tensor_reduce(dst=both, op=nl.maximum, data=row_max, axis=1, keepdims=True)
        shift = part.queries.neg_max[part.t]
        scale = part.kv.scale.negative
        if part.is_first:
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

    def _weigh(
        self, iteration: _Iteration, exps: list[tuple[_Part, nl.NkiTensor, nl.NkiTensor]]
    ) -> None:
        """Weights of an iteration: exp of the scores and of minus the shifts."""
        sizes = [own.shape[1] for *_, own in exps]
        ends = iter(
            (bank, sum(sizes[first : i + 1]))
            for bank, (first, count) in enumerate(zip((0, 2, 3), BANK_PIECES, strict=True))
            for i in range(first, min(first + count, len(sizes)))
        )
        for part, bias, own in exps:
            bank, end = next(ends)
            self._lead_ns += scalar_ns(own.shape[1])
            nisa.activation(
                dst=iteration.weights[bank][:, end - own.shape[1] : end], op=nl.exp, data=own,
                bias=bias, scale=part.kv.scale.positive,
            )  # fmt: skip

    def _correct(self, part: _Part, moved: nl.NkiTensor) -> None:
        """The correction of the accumulator; GpSimd, which has time, keeps the new shift."""
        if not part.is_first:
            shift = part.queries.neg_max[part.t]
            self._lead_ns += scalar_ns(1)
            nisa.activation(dst=part.correction, op=nl.exp, data=shift, bias=moved, scale=-1.0)
            nisa.tensor_copy(dst=shift, src=moved, engine=nisa.engine.gpsimd)

    def _transpose(self, iteration: _Iteration, i: int) -> None:
        """Transpose a bank of an iteration's weights.

        DVE brings back the last one, while PE and ACT make it wait for scores, ACT the others; of
        a short iteration's only one it is who is less busy.
        """
        banks = iteration.banks
        columns = banks[i] * PARTITIONS
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

    def _multiply(self, iteration: _Iteration) -> list[nl.NkiTensor]:
        """P V of each part, [128, d + 1] fp32 in PSUM; corrects the accumulators."""
        totals = []
        columns = iteration.columns(iteration.transposed)
        for part in iteration.parts:
            total = psum_bank()[:, 0 : part.queries.d + 1]
            totals.append(total)
            if not part.is_first:
                acc = part.queries.accumulator(part.t)
                nisa.tensor_tensor(
                    dst=acc, data1=acc,
                    data2=part.correction.ap([[1, PARTITIONS], [0, acc.shape[1]]]),
                    op=nl.multiply, engine=nisa.engine.gpsimd,
                )  # fmt: skip
            for tile in part.tiles:
                nisa.nc_matmul(
                    dst=total, stationary=next(columns), moving=part.kv.values(tile),
                    accumulate=tile > part.tiles.start,
                )  # fmt: skip
        return totals

    def _add_total(self, part: _Part, total: nl.NkiTensor) -> None:
        """A part's sum joins the accumulator."""
        queries, t = part.queries, part.t
        acc = queries.accumulator(t)
        if part.is_first:
            self._lead_ns += scalar_ns(acc.shape[1])
            nisa.tensor_copy(dst=acc, src=total, engine=nisa.engine.scalar)
        else:
            self._lead_ns -= vector_ns(acc.shape[1])
            nisa.tensor_tensor(dst=acc, data1=total, data2=acc, op=nl.add)
        block = t // Q_BLOCK_TILES
        last = block * Q_BLOCK_TILES + queries.group.tiles_of(block) - 1
        if part.is_last and t == last:
            self.block_done(queries, block)

    def _in_flight(self) -> list[_Iteration]:
        return self._pending + ([] if self._transposing is None else [self._transposing])

    def release(self, kv: KvTiles) -> None:
        """Finish the iterations in flight up to the last one that reads these kv_tiles."""
        while any(iteration.parts[0].kv.pieces is kv.pieces for iteration in self._in_flight()):
            self._advance(None)

    def drain(self) -> None:
        """Finish every iteration; the next one starts the rings of buffers anew."""
        while self._in_flight():
            self._advance(None)
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


def _parts(queries: QueryTiles, t: int, kv: KvTiles, seen: range, add: bool) -> Iterator[_Part]:
    """A q_tile over the kv_tiles that it sees, in parts of about as many pieces."""
    begin, stop = seen.start // PIECE_TILES, -(-seen.stop // PIECE_TILES)
    count = -(-(stop - begin) // ITERATION_PIECES) if seen else 0
    for i in range(count):
        first = max(seen.start, (begin + (stop - begin) * i // count) * PIECE_TILES)
        end = min(seen.stop, (begin + (stop - begin) * (i + 1) // count) * PIECE_TILES)
        yield _Part(
            queries, t, kv, range(first, end), i == 0 and not add, i == count - 1,
            sbuf((PARTITIONS, 1)),
        )  # fmt: skip


def scalar_ns(columns: int) -> float:
    """Time of an ACT instruction: a column per cycle of 1.2 GHz, and 64 more."""
    return (columns + 64) / 1.2


def vector_ns(columns: int) -> float:
    """Time of a DVE instruction: a column per cycle of 0.96 GHz, and 64 more."""
    return (columns + 64) / 0.96
