"""Exact softmax of a share against prepared columns of keys, as a pipeline of three stages.

Queries lie on partitions. A step takes one row tile through up to 2048 keys:

    scores   PE writes [128 queries, keys], adds MASKED to the keys that are not seen, by a product
             of one contraction row (absent cached keys) or with a triangle (diagonal); DVE takes
             the maximum and moves the running one, ACT writes the weights
    turn     PE transposes the weights, ACT and DVE bring them back to SBUF
    sum      PE adds weight * [values | 1], DVE corrects the accumulator by exp(old - new maximum)

The second and third stage of a step follow PENDING steps behind the first. The accumulator has the
row sum in its last column, as that of the bounded softmax.
"""

from dataclasses import dataclass
from typing import Any

from .backend import nisa, nl
from .bounded import BLOCK_TILES, num_blocks_of
from .loading import RowTiles, element_bytes
from .softmax import FLOOR, MASKED, ScoreScale
from .tile_schedule import MATMUL_COLUMNS, PARTITIONS, Share

STEP_TILES = 16
"""Key tiles of a step."""

HALF_TILES = 8
"""Key tiles of one maximum and one exp instruction: two PSUM banks."""

SCORE_BUFFERS = 3
"""Score tiles of HALF_TILES: six of the eight PSUM banks; two hold transposes and sums."""

PENDING = 2
"""Steps between the first and the other stages."""

FEW_TILES = 8
"""Row tiles below which two steps of other work are issued beside each step."""

AHEAD = 2
"""Groups of transposed weights between a transpose and its use: one in each bank."""

DVE_TURN = 4
"""Of so many groups of transposed weights DVE brings back one, ACT the others; in the first step of
a row tile, beside which DVE prepares the chunk, ACT brings back all."""

TURN_BYTES = 1024
"""Bytes of a PSUM bank that hold transposes; behind them lies a sum."""


@dataclass
class ExactStep(nl.NKIObject):
    """One row tile against consecutive key tiles."""

    t: int
    keys: nl.NkiTensor  # [d, ...]
    values: nl.NkiTensor  # [128, ...] values with ones
    first: int  # key tile
    count: int
    mask: nl.NkiTensor | None  # [1, ...]: 0, or MASKED where a key is absent
    is_diagonal: bool  # the last key tile is the row tile's own
    is_first: bool  # of the row tile: there is no accumulator yet
    scale: ScoreScale
    index: int
    correction: nl.NkiTensor  # [128, 1] fp32, of the accumulator


class ExactRows(nl.NKIObject):
    """The queries of a share, their state, and the pipeline.

    Row tile t = i * num_heads + h is tile row_tiles[i] of head h of the share.
    """

    def __init__(self, share: Share, d: int, dtype: str, scale: float) -> None:
        self.share = share
        self.num_tiles = share.num_heads * len(share.row_tiles)
        self.num_blocks = num_blocks_of(share)
        self.d = d
        self.chunk_scale = scale
        self.scale = ScoreScale(scale, -scale)
        self.needs_mask = True
        # With few row tiles a segment has few steps to prepare the next one beside. Two are as many
        # as may be: the values are written LAG steps after the start, which must come after the
        # steps in flight that read them.
        self.steps_beside = 1
        if self.num_tiles < FEW_TILES:
            self.steps_beside = 2
        # Beside the steps over a chunk ACT has more time than DVE.
        self.scalar_is_free = True
        shape = (PARTITIONS, self.num_tiles)
        self.queries = nl.ndarray((d, self.num_tiles * PARTITIONS), dtype=dtype, buffer=nl.sbuf)
        self.neg_shift = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        self.acc = nl.ndarray(
            (PARTITIONS, self.num_tiles * (d + 1)), dtype=nl.float32, buffer=nl.sbuf
        )
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
        self.later = nl.ndarray(square, dtype=nl.bfloat16, buffer=nl.sbuf)
        self.pending: list[ExactStep] = []
        self.summing: list[ExactStep] = []
        self.num_scores = 0
        self.num_steps = 0
        self.num_turns = 0
        self.beside: list[list[Any]] = []
        self.result: Any = None

    def tiles_of(self, block: int) -> int:
        """Row tiles of a block."""
        return min(BLOCK_TILES, self.num_tiles - block * BLOCK_TILES)

    def row_tile(self, t: int) -> int:
        """Row tile of the chunk that tile t of the share is."""
        return self.share.row_tiles[t // self.share.num_heads]

    def num_keys(self, block: int) -> int:
        """Key tiles of the chunk that a block sees."""
        return self.row_tile(block * BLOCK_TILES + self.tiles_of(block) - 1) + 1

    def shifts_of(self, first: int, end: int) -> nl.NkiTensor:
        """Minus the shifts of some tiles, 128 x tiles."""
        return self.neg_shift[:, first:end]

    def clear_from(self, block: int) -> None:
        """No key seen yet: for the tiles of this block and of those after it."""
        first = block * BLOCK_TILES
        if first < self.num_tiles:
            nisa.memset(
                dst=self.acc[:, first * (self.d + 1) : self.acc.shape[1]], value=0.0,
                engine=nisa.engine.gpsimd,
            )  # fmt: skip
            nisa.memset(
                dst=self.neg_shift[:, first : self.num_tiles], value=-self.chunk_scale * FLOOR,
                engine=nisa.engine.gpsimd,
            )  # fmt: skip

    def write_constants(self) -> None:
        """Ones, the identity, and MASKED at the keys after a query."""
        nisa.memset(dst=self.ones, value=1.0, engine=nisa.engine.gpsimd)
        nisa.memset(dst=self.identity, value=1.0, engine=nisa.engine.gpsimd)
        nisa.memset(dst=self.later, value=MASKED, engine=nisa.engine.gpsimd)
        pattern = [[1, PARTITIONS]]
        nisa.affine_select(
            dst=self.identity, pattern=pattern, channel_multiplier=-1, on_true_tile=self.identity,
            on_false_value=0.0, cmp_op=nl.equal,
        )  # fmt: skip
        nisa.affine_select(
            dst=self.later, pattern=pattern, channel_multiplier=-1, on_true_tile=self.later,
            on_false_value=0.0, cmp_op=nl.greater,
        )  # fmt: skip

    def attend_chunk(self, keys: nl.NkiTensor, values: nl.NkiTensor, block: int, add: bool) -> None:
        """A block over the chunk's key tiles up to its diagonal; `add`: it has an accumulator."""
        for i in range(self.tiles_of(block)):
            t = block * BLOCK_TILES + i
            num_keys = self.row_tile(t) + 1
            for first in range(0, num_keys, STEP_TILES):
                count = min(STEP_TILES, num_keys - first)
                last = first + count == num_keys
                is_first = first == 0 and not add
                self.issue(t, keys, values, first, count, None, last, is_first, self.scale)

    def attend_segment(
        self,
        keys: nl.NkiTensor,  # [d, tokens * 128]
        values: nl.NkiTensor,  # [128, tokens * (d + 1)]
        mask: nl.NkiTensor | None,  # [1, tokens * 128]
        tokens: int,
        scale: ScoreScale,
    ) -> None:
        """Every row tile over one segment of the prior."""
        for t in range(self.num_tiles):
            for first in range(0, tokens, STEP_TILES):
                count = min(STEP_TILES, tokens - first)
                self.issue(t, keys, values, first, count, mask, False, False, scale)

    def issue(
        self,
        t: int,
        keys: nl.NkiTensor,
        values: nl.NkiTensor,
        first: int,
        count: int,
        mask: nl.NkiTensor | None,
        is_diagonal: bool,
        is_first: bool,
        scale: ScoreScale,
    ) -> None:
        """The first stage of a step, and the others of the one PENDING places before."""
        correction = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        step = ExactStep(
            t, keys, values, first, count, mask, is_diagonal, is_first, scale, self.num_steps,
            correction,
        )  # fmt: skip
        self.num_steps = self.num_steps + 1
        turns = False
        halves: list[nl.NkiTensor] = []
        largest = nl.ndarray((PARTITIONS, 2), dtype=nl.float32, buffer=nl.sbuf)
        num_halves = (count + HALF_TILES - 1) // HALF_TILES
        for half in range(num_halves):
            halves.append(self.write_scores(step, half, largest))
            if half == 0 and len(self.pending) == PENDING:
                self.begin_turn()
                turns = True
        if turns:
            self.end_turn()
        bias = self.move_shift(step, largest, num_halves)
        weights = self.weights[step.index % (PENDING + 1)]
        for half in range(num_halves):
            scores = halves[half]
            begin = half * HALF_TILES * PARTITIONS
            nisa.activation(
                dst=weights[:, begin : begin + scores.shape[1]], op=nl.exp, data=scores,
                bias=bias, scale=scale.positive,
            )  # fmt: skip
        self.pending.append(step)
        for _ in range(self.steps_beside):
            for queue in self.beside:
                for work in queue:
                    if work.done < work.steps:
                        work.step()
                        break

    def write_scores(self, step: ExactStep, half: int, largest: nl.NkiTensor) -> nl.NkiTensor:
        """Scores of up to HALF_TILES key tiles in PSUM, and their maximum in column `half`."""
        keys, mask = step.keys, step.mask
        queries = self.queries[:, step.t * PARTITIONS : (step.t + 1) * PARTITIONS]
        begin = half * HALF_TILES
        tiles = min(HALF_TILES, step.count - begin)
        key = (step.first + begin) * PARTITIONS
        scores = self.scores[self.num_scores % SCORE_BUFFERS][:, 0 : tiles * PARTITIONS]
        self.num_scores = self.num_scores + 1
        for column in range(0, tiles * PARTITIONS, MATMUL_COLUMNS):
            end = min(column + MATMUL_COLUMNS, tiles * PARTITIONS)
            nisa.nc_matmul(
                dst=scores[:, column:end], stationary=queries,
                moving=keys[:, key + column : key + end], accumulate=False,
            )  # fmt: skip
            if mask is not None:
                nisa.nc_matmul(
                    dst=scores[:, column:end], stationary=self.ones,
                    moving=mask[:, key + column : key + end], accumulate=True,
                )  # fmt: skip
        if step.is_diagonal and begin + tiles == step.count:
            nisa.nc_matmul(
                dst=scores[:, (tiles - 1) * PARTITIONS : tiles * PARTITIONS],
                stationary=self.identity, moving=self.later, accumulate=True,
            )  # fmt: skip
        nisa.tensor_reduce(
            dst=largest[:, half : half + 1], op=nl.maximum, data=scores, axis=1, keepdims=True
        )
        return scores

    def move_shift(self, step: ExactStep, largest: nl.NkiTensor, num_halves: int) -> nl.NkiTensor:
        """Move the running maximum; minus the new one, and the correction of the accumulator."""
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
        nisa.activation(dst=step.correction, op=nl.exp, data=shift, bias=moved, scale=-1.0)
        nisa.tensor_copy(dst=shift, src=moved)
        return moved

    def groups_of(self, step: ExactStep) -> int:
        """Groups of key tiles whose weights are transposed together."""
        group = self.tiles_per_turn(self.weights[0].dtype)
        return (step.count + group - 1) // group

    def tiles_per_turn(self, dtype: str) -> int:
        """Tiles that are transposed together."""
        return TURN_BYTES // (element_bytes(dtype) * PARTITIONS)

    def begin_turn(self) -> None:
        """End the sums of one step; the first groups of the next one's weights."""
        for step in self.summing:
            self.finish(step)
        self.summing = []
        if len(self.pending) > 0:
            self.turn(self.pending[0], 0, AHEAD)

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
            engine = nisa.engine.scalar
            if group % DVE_TURN == 0 and not step.is_first:
                engine = nisa.engine.vector
            self.transpose(
                RowTiles(weights, PARTITIONS, PARTITIONS), first, count,
                turned[:, first * PARTITIONS : (first + count) * PARTITIONS], engine,
            )  # fmt: skip

    def add_values(self, step: ExactStep, group: int) -> None:
        """P V of a group."""
        d = self.d
        turned = self.turned[step.index % 2]
        total = self.banks[step.index % 2][:, TURN_BYTES // 4 : TURN_BYTES // 4 + d + 1]
        tiles = self.tiles_per_turn(turned.dtype)
        for j in range(group * tiles, min((group + 1) * tiles, step.count)):
            value = (step.first + j) * (d + 1)
            nisa.nc_matmul(
                dst=total, stationary=turned[:, j * PARTITIONS : (j + 1) * PARTITIONS],
                moving=step.values[:, value : value + d + 1], accumulate=j > 0,
            )  # fmt: skip

    def finish(self, step: ExactStep) -> None:
        """P V of the last groups, and the accumulator."""
        d = self.d
        groups = self.groups_of(step)
        for group in range(max(0, groups - AHEAD), groups):
            self.add_values(step, group)
        total = self.banks[step.index % 2][:, TURN_BYTES // 4 : TURN_BYTES // 4 + d + 1]
        acc = self.acc[:, step.t * (d + 1) : (step.t + 1) * (d + 1)]
        if step.is_first:
            nisa.tensor_copy(dst=acc, src=total, engine=nisa.engine.scalar)
        else:
            nisa.scalar_tensor_tensor(
                dst=acc, data=acc, op0=nl.multiply, operand0=step.correction, op1=nl.add,
                operand1=total,
            )  # fmt: skip
        ends_block = (step.t + 1) % BLOCK_TILES == 0 or step.t + 1 == self.num_tiles
        if self.result is not None and step.is_diagonal and ends_block:
            self.result.add_block(step.t // BLOCK_TILES)

    def drain(self) -> None:
        """Finish every step; the next one starts the rings of buffers anew."""
        while len(self.pending) + len(self.summing) > 0:
            self.begin_turn()
            self.end_turn()
        self.num_scores = 0
        self.num_steps = 0
        self.num_turns = 0

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
        height = tiles.parts * tiles.width
        per_word = 4 // element_bytes(dtype)
        group = TURN_BYTES // (element_bytes(dtype) * PARTITIONS)
        for begin in range(0, num_tiles, group):
            count = min(group, num_tiles - begin)
            bank = self.banks[self.num_turns % 2].ap(
                [[MATMUL_COLUMNS * per_word, height], [1, count * PARTITIONS]], offset=0,
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
