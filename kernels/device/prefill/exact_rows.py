"""Exact softmax of a share against prepared columns of keys, as a pipeline of three stages.

Queries lie on partitions. A step takes one row tile through up to 2048 keys:

    scores   PE writes [128 queries, keys], adds MASKED to the keys that are not seen, by a product
             with a triangle (tiles that are seen in part, band.py) or of one contraction row
             (absent cached keys, unless first_key.py stands in for them); DVE takes the maximum and
             moves the running one, ACT writes the weights
    turn     PE transposes the weights, ACT and DVE bring them back to SBUF
    sum      PE adds weight * [values | 1]; GpSimd corrects the accumulator by exp(old - new
             maximum), DVE adds to it

The second and third stage of a step follow PENDING steps behind the first. The accumulator has the
row sum in its last column, as that of the bounded softmax. ACT and DVE, the busiest engines, are
kept equally busy by the choice of who brings back weights; at best both take 1.7 times as long as
ACT takes for the bounded softmax (16 key tiles: 3.1 us for maximum, exp, transposed weights and
sum, against 1.8 us of exp).
"""

from dataclasses import dataclass
from typing import Any

from ...backend import nisa, nl
from ...sizes import FLOOR, MASKED, MATMUL_COLUMNS, PARTITIONS, PSUM_BANK_BYTES
from ..loading import RowTiles, element_bytes
from ..softmax import ScoreScale
from .share_tiles import BLOCK_TILES, ShareTiles

STEP_TILES = 16
"""Key tiles of a step."""

HALF_TILES = 8
"""Most key tiles of one maximum and one exp instruction: two PSUM banks."""

SCORE_BUFFERS = 3
"""Score tiles of HALF_TILES: six of the eight PSUM banks; two hold transposes and sums."""

PENDING = 2
"""Steps between the first and the other stages."""

SHORT_SHARE_TILES = 8
"""Row tiles below which two steps of other work are issued beside each step."""

AHEAD = 2
"""Groups of transposed weights between a transpose and its use: one in each bank."""

TURN_BYTES = 1024
"""Most bytes of a PSUM bank that hold transposes; its end holds a sum."""


@dataclass
class ExactStep(nl.NKIObject):
    """One row tile against consecutive key tiles."""

    t: int
    keys: list[nl.NkiTensor]  # per 128 features [<= 128, ...]
    values: nl.NkiTensor  # [128, ...] values with ones
    first: int  # key tile
    count: int
    mask: nl.NkiTensor | None  # [1, ...]: 0, or MASKED where a key is absent
    first_tile: int | None  # key tile (band.py) of column 0; None: every row sees all
    is_first: bool  # of the row tile: there is no accumulator yet
    ends_chunk: bool  # the row tile has seen all of the chunk then
    scale: ScoreScale
    index: int
    correction: nl.NkiTensor  # [128, 1] fp32, of the accumulator


class ExactRows(nl.NKIObject):
    """The state of a share's softmax, and the pipeline."""

    def __init__(self, tiles: ShareTiles, dtype: str, scale: float) -> None:
        self.tiles = tiles
        self.chunk_scale = scale
        self.scale = ScoreScale(scale, -scale)
        self.is_exact = True
        # With few row tiles a segment has few steps to prepare the next one beside. Two are as many
        # as may be: the values are written bounded.LAG steps after the start, which must come after
        # the steps in flight that read them.
        self.steps_beside = 1
        if tiles.num_tiles < SHORT_SHARE_TILES:
            self.steps_beside = 2
        # Beside the steps over a chunk ACT has more time than DVE.
        self.scalar_is_free = True
        self.neg_shift = nl.ndarray((PARTITIONS, tiles.num_tiles), dtype=nl.float32, buffer=nl.sbuf)
        self.scores: list[nl.NkiTensor] = []
        for _ in range(SCORE_BUFFERS):
            self.scores.append(
                nl.ndarray((PARTITIONS, HALF_TILES * PARTITIONS), dtype=nl.float32, buffer=nl.psum)
            )
        self.banks: list[nl.NkiTensor] = []
        for _ in range(2):
            self.banks.append(
                nl.ndarray((PARTITIONS, MATMUL_COLUMNS), dtype=nl.float32, buffer=nl.psum)
            )
        self.weights: list[nl.NkiTensor] = []
        width = STEP_TILES * PARTITIONS
        for _ in range(PENDING + 1):
            self.weights.append(nl.ndarray((PARTITIONS, width), dtype=dtype, buffer=nl.sbuf))
        self.turned: list[nl.NkiTensor] = []
        for _ in range(2):
            self.turned.append(nl.ndarray((PARTITIONS, width), dtype=dtype, buffer=nl.sbuf))
        self.ones = nl.ndarray((1, PARTITIONS), dtype=nl.bfloat16, buffer=nl.sbuf)
        square = (PARTITIONS, PARTITIONS)
        self.identity = nl.ndarray(square, dtype=nl.bfloat16, buffer=nl.sbuf)
        # MASKED at the keys that a row does not see, for each distance of tiles seen in part.
        self.cut_distances = tiles.band.cut_distances()
        self.unseen: list[nl.NkiTensor] = []
        for _ in self.cut_distances:
            self.unseen.append(nl.ndarray(square, dtype=nl.bfloat16, buffer=nl.sbuf))
        self.pending: list[ExactStep] = []
        self.summing: list[ExactStep] = []
        self.num_scores = 0
        self.num_steps = 0
        self.num_turns = 0
        # By how much more time ACT is busy than DVE.
        self.lead_ns = 0.0
        # As in bounded.py; vector_ns of each is the time of a step on DVE, about.
        self.beside: list[list[Any]] = []
        self.result: Any = None

    def shifts_of(self, first: int, end: int) -> nl.NkiTensor:
        """Minus the shifts of some tiles, 128 x tiles."""
        return self.neg_shift[:, first:end]

    def clear_from(self, block: int) -> None:
        """No key seen yet: for the tiles of this block and of those after it."""
        acc = self.tiles.acc
        first = block * BLOCK_TILES
        if first < self.tiles.num_tiles:
            nisa.memset(
                dst=acc[:, first * (self.tiles.d + 1) : acc.shape[1]], value=0.0,
                engine=nisa.engine.gpsimd,
            )  # fmt: skip
            nisa.memset(
                dst=self.neg_shift[:, first : self.tiles.num_tiles],
                value=-self.chunk_scale * FLOOR, engine=nisa.engine.gpsimd,
            )  # fmt: skip

    def write_constants(self) -> None:
        """Ones, the identity, and what is added to tiles that are seen in part."""
        nisa.memset(dst=self.ones, value=1.0, engine=nisa.engine.gpsimd)
        nisa.memset(dst=self.identity, value=1.0, engine=nisa.engine.gpsimd)
        nisa.affine_select(
            dst=self.identity, pattern=[[1, PARTITIONS]], channel_multiplier=-1,
            on_true_tile=self.identity, on_false_value=0.0, cmp_op=nl.equal,
        )  # fmt: skip
        for i in range(len(self.unseen)):
            nisa.memset(dst=self.unseen[i], value=0.0, engine=nisa.engine.gpsimd)
            self.tiles.band.select(self.unseen[i], self.cut_distances[i], 1, False, MASKED)

    def attend_chunk(
        self, keys: list[nl.NkiTensor], values: nl.NkiTensor, block: int, add: bool
    ) -> None:
        """A block over the chunk's key tiles up to its diagonal; `add`: it has an accumulator."""
        for i in range(self.tiles.tiles_of(block)):
            t = block * BLOCK_TILES + i
            first = max(0, self.tiles.oldest_key(t))
            end = self.tiles.row_tile(t) + 1
            self.attend_keys(t, first, end, keys, values, None, 0, add, True, self.scale)

    def attend_segment(
        self,
        keys: list[nl.NkiTensor],  # per 128 features [<= 128, tokens * 128]
        values: nl.NkiTensor,  # [128, tokens * (d + 1)]
        mask: nl.NkiTensor | None,  # [1, tokens * 128]
        tokens: int,
        scale: ScoreScale,
        first_tile: int | None,  # key tile (band.py) of the first; None: every row sees all
    ) -> None:
        """Every row tile over one segment of the prior."""
        for t in range(self.tiles.num_tiles):
            first = 0
            if first_tile is not None:
                first = max(0, self.tiles.oldest_key(t) - first_tile)
            self.attend_keys(t, first, tokens, keys, values, mask, first_tile, True, False, scale)

    def attend_keys(
        self,
        t: int,
        begin: int,
        end: int,
        keys: list[nl.NkiTensor],
        values: nl.NkiTensor,
        mask: nl.NkiTensor | None,
        first_tile: int | None,
        add: bool,
        ends_chunk: bool,
        scale: ScoreScale,
    ) -> None:
        """A row tile over the key tiles begin .. end - 1 of some columns."""
        first = begin
        for steps in range((end - begin + STEP_TILES - 1) // STEP_TILES, 0, -1):
            # Of about the same length: a short step has the latencies of a long one.
            count = (end - first + steps - 1) // steps
            is_first = first == begin and not add
            last = ends_chunk and first + count == end
            self.issue(t, keys, values, first, count, mask, first_tile, is_first, last, scale)
            first = first + count

    def issue(
        self,
        t: int,
        keys: list[nl.NkiTensor],
        values: nl.NkiTensor,
        first: int,
        count: int,
        mask: nl.NkiTensor | None,
        first_tile: int | None,
        is_first: bool,
        ends_chunk: bool,
        scale: ScoreScale,
    ) -> None:
        """The first stage of a step, and the others of the one PENDING places before."""
        correction = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        step = ExactStep(
            t, keys, values, first, count, mask, first_tile, is_first, ends_chunk, scale,
            self.num_steps, correction,
        )  # fmt: skip
        self.num_steps = self.num_steps + 1
        halves: list[nl.NkiTensor] = []
        largest = nl.ndarray((PARTITIONS, 2), dtype=nl.float32, buffer=nl.sbuf)
        num_halves = (count + HALF_TILES - 1) // HALF_TILES
        turns = len(self.pending) == PENDING
        for half in range(num_halves):
            halves.append(self.write_scores(step, half, largest))
            if turns and half + 1 < num_halves:
                self.begin_turn()
        # exp waits for the shift: DVE makes it before it brings back transposed weights.
        bias = self.move_shift(step, largest, num_halves)
        if turns and num_halves == 1:
            self.begin_turn()
        if turns:
            self.end_turn()
        weights = self.weights[step.index % (PENDING + 1)]
        for half in range(num_halves):
            scores = halves[half]
            begin = half * tiles_of_half(step) * PARTITIONS
            self.lead_ns = self.lead_ns + scalar_ns(scores.shape[1])
            nisa.activation(
                dst=weights[:, begin : begin + scores.shape[1]], op=nl.exp, data=scores,
                bias=bias, scale=scale.positive,
            )  # fmt: skip
        self.correct(step, bias)
        self.pending.append(step)
        for _ in range(self.steps_beside):
            for queue in self.beside:
                for work in queue:
                    if work.done < work.steps:
                        work.step()
                        self.lead_ns = self.lead_ns - work.vector_ns
                        break

    def engine_of_turn(self, columns: int, may_be_vector: bool) -> nisa.engine:
        """Who brings back transposed weights: ACT, or DVE where it is less busy.

        Of two groups in a row, in different banks, DVE takes one at most: so both work at once.
        """
        if may_be_vector and self.lead_ns > 0:
            self.lead_ns = self.lead_ns - vector_ns(columns // 2)
            return nisa.engine.vector
        self.lead_ns = self.lead_ns + scalar_ns(columns)
        return nisa.engine.scalar

    def write_scores(self, step: ExactStep, half: int, largest: nl.NkiTensor) -> nl.NkiTensor:
        """Scores of a half of the key tiles in PSUM, and their maximum in column `half`."""
        mask = step.mask
        begin = half * tiles_of_half(step)
        tiles = min(tiles_of_half(step), step.count - begin)
        query = step.t * PARTITIONS
        key = (step.first + begin) * PARTITIONS
        scores = self.scores[self.num_scores % SCORE_BUFFERS][:, 0 : tiles * PARTITIONS]
        self.num_scores = self.num_scores + 1
        for column in range(0, tiles * PARTITIONS, MATMUL_COLUMNS):
            end = min(column + MATMUL_COLUMNS, tiles * PARTITIONS)
            for part in range(len(step.keys)):
                keys, queries = step.keys[part], self.tiles.queries[part]
                nisa.nc_matmul(
                    dst=scores[:, column:end], stationary=queries[:, query : query + PARTITIONS],
                    moving=keys[:, key + column : key + end], accumulate=part > 0,
                )  # fmt: skip
            if mask is not None:
                nisa.nc_matmul(
                    dst=scores[:, column:end], stationary=self.ones,
                    moving=mask[:, key + column : key + end], accumulate=True,
                )  # fmt: skip
        for j in range(tiles):
            self.add_unseen(step, begin + j, scores[:, j * PARTITIONS : (j + 1) * PARTITIONS])
        self.lead_ns = self.lead_ns - vector_ns(tiles * PARTITIONS)
        nisa.tensor_reduce(
            dst=largest[:, half : half + 1], op=nl.maximum, data=scores, axis=1, keepdims=True
        )
        return scores

    def add_unseen(self, step: ExactStep, j: int, scores: nl.NkiTensor) -> None:
        """Add MASKED to what the row tile does not see of the step's key tile j."""
        if step.first_tile is not None:
            distance = self.tiles.row_tile(step.t) - step.first_tile - step.first - j
            for i in range(len(self.unseen)):
                if self.cut_distances[i] == distance:
                    nisa.nc_matmul(
                        dst=scores, stationary=self.identity, moving=self.unseen[i],
                        accumulate=True,
                    )  # fmt: skip

    def move_shift(self, step: ExactStep, largest: nl.NkiTensor, num_halves: int) -> nl.NkiTensor:
        """Minus the running maximum, moved by a step."""
        self.lead_ns = self.lead_ns - num_halves * vector_ns(1)
        both = largest[:, 0:1]
        if num_halves == 2:
            both = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(
                dst=both, data1=largest[:, 0:1], data2=largest[:, 1:2], op=nl.maximum
            )
        shift = self.neg_shift[:, step.t : step.t + 1]
        if step.is_first:
            nisa.tensor_scalar(
                dst=shift, data=both, op0=nl.maximum, operand0=FLOOR, op1=nl.multiply,
                operand1=step.scale.negative,
            )  # fmt: skip
            return shift
        moved = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=moved, data=both, op0=nl.multiply, operand0=step.scale.negative,
            op1=nl.minimum, operand1=shift,
        )  # fmt: skip
        return moved

    def correct(self, step: ExactStep, moved: nl.NkiTensor) -> None:
        """The correction of the accumulator; GpSimd, which has time, keeps the new shift."""
        if not step.is_first:
            shift = self.neg_shift[:, step.t : step.t + 1]
            self.lead_ns = self.lead_ns + scalar_ns(1)
            nisa.activation(dst=step.correction, op=nl.exp, data=shift, bias=moved, scale=-1.0)
            nisa.tensor_copy(dst=shift, src=moved, engine=nisa.engine.gpsimd)

    def rescale(self, step: ExactStep) -> None:
        """Correct the accumulator by what a step moved the maximum."""
        if not step.is_first:
            nisa.tensor_tensor(
                dst=self.acc_of(step), data1=self.acc_of(step),
                data2=step.correction.ap([[1, PARTITIONS], [0, self.tiles.d + 1]]),
                op=nl.multiply, engine=nisa.engine.gpsimd,
            )  # fmt: skip

    def acc_of(self, step: ExactStep) -> nl.NkiTensor:
        """The accumulator of a step's row tile, [128, d + 1]."""
        width = self.tiles.d + 1
        return self.tiles.acc[:, step.t * width : (step.t + 1) * width]

    def groups_of(self, step: ExactStep) -> int:
        """Groups of key tiles whose weights are transposed together."""
        group = self.tiles_per_turn(self.weights[0].dtype)
        return (step.count + group - 1) // group

    def tiles_per_turn(self, dtype: str) -> int:
        """Tiles that are transposed together."""
        free = min(TURN_BYTES, PSUM_BANK_BYTES - 4 * (self.tiles.d + 1))
        return free // (element_bytes(dtype) * PARTITIONS)

    def sum_of(self, step: ExactStep) -> nl.NkiTensor:
        """P V of a step, [128, d + 1] at the end of a bank."""
        bank = self.banks[step.index % 2]
        return bank[:, MATMUL_COLUMNS - self.tiles.d - 1 : MATMUL_COLUMNS]

    def begin_turn(self) -> None:
        """The first groups of one step's weights; end the sums of the step before.

        In this order, as PE waits for transposed weights longer than for a bank.
        """
        if len(self.pending) > 0:
            self.turn(self.pending[0], 0, AHEAD)
        for step in self.summing:
            self.finish(step)
        self.summing = []
        if len(self.pending) > 0:
            self.rescale(self.pending[0])

    def end_turn(self) -> None:
        """The other groups, each with the sum of the group AHEAD places before."""
        if len(self.pending) > 0:
            step = self.pending[0]
            self.pending = self.pending[1:]
            for group in range(AHEAD, self.groups_of(step)):
                self.turn(step, group, group + 1)
                self.add_values(step, group - AHEAD)
            self.summing.append(step)

    def turn(self, step: ExactStep, begin: int, end: int) -> None:
        """Transpose groups begin .. end - 1 of a step's weights, as far as it has them."""
        weights = self.weights[step.index % (PENDING + 1)]
        turned = self.turned[step.index % 2]
        tiles = self.tiles_per_turn(weights.dtype)
        for group in range(begin, min(end, self.groups_of(step))):
            first = group * tiles
            count = min(tiles, step.count - first)
            engine = self.engine_of_turn(count * PARTITIONS, group % 2 == 0)
            self.transpose(
                RowTiles(weights, PARTITIONS, PARTITIONS), first, count,
                turned[:, first * PARTITIONS : (first + count) * PARTITIONS], engine,
            )  # fmt: skip

    def add_values(self, step: ExactStep, group: int) -> None:
        """P V of a group."""
        d = self.tiles.d
        turned = self.turned[step.index % 2]
        total = self.sum_of(step)
        tiles = self.tiles_per_turn(turned.dtype)
        for j in range(group * tiles, min((group + 1) * tiles, step.count)):
            value = (step.first + j) * (d + 1)
            nisa.nc_matmul(
                dst=total, stationary=turned[:, j * PARTITIONS : (j + 1) * PARTITIONS],
                moving=step.values[:, value : value + d + 1], accumulate=j > 0,
            )  # fmt: skip

    def finish(self, step: ExactStep) -> None:
        """P V of the last groups, and the accumulator."""
        groups = self.groups_of(step)
        for group in range(max(0, groups - AHEAD), groups):
            self.add_values(step, group)
        total = self.sum_of(step)
        acc = self.acc_of(step)
        if step.is_first:
            self.lead_ns = self.lead_ns + scalar_ns(self.tiles.d + 1)
            nisa.tensor_copy(dst=acc, src=total, engine=nisa.engine.scalar)
        else:
            self.lead_ns = self.lead_ns - vector_ns(self.tiles.d + 1)
            nisa.tensor_tensor(dst=acc, data1=total, data2=acc, op=nl.add)
        ends_block = (step.t + 1) % BLOCK_TILES == 0 or step.t + 1 == self.tiles.num_tiles
        if self.result is not None and step.ends_chunk and ends_block:
            self.result.add_block(step.t // BLOCK_TILES)

    def drain(self) -> None:
        """Finish every step; the next one starts the rings of buffers anew."""
        while len(self.pending) + len(self.summing) > 0:
            self.begin_turn()
            self.end_turn()
        self.num_scores = 0
        self.num_steps = 0
        self.num_turns = 0
        self.lead_ns = 0.0

    def transpose(
        self,
        tiles: RowTiles,
        first_tile: int,
        num_tiles: int,
        columns: nl.NkiTensor,
        engine: nisa.engine = nisa.engine.vector,
    ) -> None:
        """Row tiles into columns [height, num_tiles * 128], through the front of a bank."""
        dtype = tiles.rows.dtype
        per_word = 4 // element_bytes(dtype)
        group = self.tiles_per_turn(dtype)
        for begin in range(0, num_tiles, group):
            count = min(group, num_tiles - begin)
            bank = self.banks[self.num_turns % 2].ap(
                [[MATMUL_COLUMNS * per_word, tiles.width], [1, count * PARTITIONS]], offset=0,
                dtype=dtype,
            )  # fmt: skip
            self.num_turns = self.num_turns + 1
            for t in range(count):
                nisa.nc_transpose(
                    dst=bank[:, t * PARTITIONS : (t + 1) * PARTITIONS],
                    data=tiles.tile(first_tile + begin + t),
                    engine=nisa.engine.tensor,
                )
            nisa.tensor_copy(
                dst=columns[:, begin * PARTITIONS : (begin + count) * PARTITIONS], src=bank,
                engine=engine,
            )  # fmt: skip


def tiles_of_half(step: ExactStep) -> int:
    """Key tiles of each half of a step, the last one with one less perhaps, or of all of it."""
    halves = (step.count + HALF_TILES - 1) // HALF_TILES
    return (step.count + halves - 1) // halves


def scalar_ns(columns: int) -> float:
    """Time of an ACT instruction: a column per cycle of 1.2 GHz, and 64 more."""
    return (columns + 64) / 1.2


def vector_ns(columns: int) -> float:
    """Time of a DVE instruction: a column per cycle of 0.96 GHz, and 64 more."""
    return (columns + 64) / 0.96
