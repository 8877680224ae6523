"""Bounded softmax: scores transposed, one fixed shift per share, verified at the end.

Keys lie on partitions. Scores of 128 keys against a block of up to 512 queries come out of PE as
[128 keys, 512 queries]; exp goes straight from PSUM to the weights in SBUF, and these are the
stationary operand of P V, whose moving operand is [values | 1]: the last column is the row sum. No
maximum is taken, no weight is transposed, nothing is rescaled.

The shift c of a share is the largest of a sample of its scores minus HEADROOM (shift_estimate.py).
It is an estimate: other scores may be larger, other rows may see smaller ones only. What makes a
result right is the check on the row sum l of every real row,

    SMALLEST_SUM <= l <= LARGEST_SUM, and the row's output is finite:

every weight of a row has the one factor exp(-c), so what exp flushed to zero is below
N * exp(-87) of a sum that is at least exp(-60), and an overflow shows as infinity or NaN. A row
that fails raises the flag of its share, and the exact kernel runs instead.
"""

from dataclasses import dataclass
from typing import Any

from .backend import nisa, nl
from .loading import RowTiles, element_bytes
from .softmax import ScoreScale
from .tile_schedule import MATMUL_COLUMNS, PARTITIONS, Share

BLOCK_TILES = MATMUL_COLUMNS // PARTITIONS
"""Row tiles of a block: its 512 query columns are the moving operand of a matmul."""

KEYS_PER_EXP = 2
"""Key tiles of one exp instruction, a PSUM bank each."""

SCORE_BUFFERS = 3
"""Score tiles of KEYS_PER_EXP banks: six of the eight PSUM banks; two hold P V."""

LAG = 4
"""Macros by which P V trails the scores, so that PE never waits for exp."""

WEIGHT_BUFFERS = 8
"""Weight tiles in SBUF, at least LAG + 1: fewer would overwrite weights before P V reads them."""

SCALAR_BLOCKS = 4
"""Blocks of a chunk whose exp takes less time than what DVE has to do for them."""

SUM_BANKS = BLOCK_TILES // 2
"""PSUM banks of the P V results of a block, two row tiles each; their ends serve transposes."""


@dataclass
class Macro(nl.NKIObject):
    """Up to KEYS_PER_EXP key tiles against one block of queries."""

    block: int
    keys: nl.NkiTensor  # [d, ...] key columns
    key_columns: list[int]  # where each key tile starts
    first_tiles: list[int]  # row tile of the block that each key tile is first seen by
    diagonal_ends: list[int]  # row tiles before this one have the key tile on their diagonal
    values: nl.NkiTensor  # [128, ...] values with ones
    value_columns: list[int]
    first: bool  # begins the block's pass
    last: bool  # ends the block's pass
    add: bool  # the pass adds to the accumulator instead of setting it


def num_blocks_of(share: Share) -> int:
    """Blocks of a share's row tiles."""
    tiles = share.num_heads * len(share.row_tiles)
    return (tiles + BLOCK_TILES - 1) // BLOCK_TILES


class BoundedRows(nl.NKIObject):
    """The queries of a share, their accumulators, and the pipeline that fills these.

    Row tile t = i * num_heads + h is tile row_tiles[i] of head h of the share.
    """

    def __init__(self, share: Share, d: int, dtype: str, scale: float) -> None:
        self.share = share
        self.num_tiles = share.num_heads * len(share.row_tiles)
        self.num_blocks = num_blocks_of(share)
        self.d = d
        self.scale = scale
        self.needs_mask = False
        self.scalar_is_free = False
        self.queries = nl.ndarray((d, self.num_tiles * PARTITIONS), dtype=dtype, buffer=nl.sbuf)
        self.neg_shift = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        self.acc = nl.ndarray(
            (PARTITIONS, self.num_tiles * (d + 1)), dtype=nl.float32, buffer=nl.sbuf
        )
        self.scores: list[nl.NkiTensor] = []
        width = KEYS_PER_EXP * MATMUL_COLUMNS
        for _ in range(SCORE_BUFFERS):
            self.scores.append(nl.ndarray((PARTITIONS, width), dtype=nl.float32, buffer=nl.psum))
        self.weights: list[nl.NkiTensor] = []
        for _ in range(WEIGHT_BUFFERS):
            self.weights.append(nl.ndarray((PARTITIONS, width), dtype=dtype, buffer=nl.sbuf))
        self.sums = nl.ndarray(
            (PARTITIONS, SUM_BANKS * MATMUL_COLUMNS), dtype=nl.float32, buffer=nl.psum
        )
        self.macros: list[Macro] = []
        self.retired = 0
        # Queues of work that is issued in small steps between macros: objects with step, done and
        # steps. Each queue gives one step per macro.
        self.beside: list[list[Any]] = []
        # Told of each block of the chunk that is complete, by add_block.
        self.result: Any = None

    def tiles_of(self, block: int) -> int:
        """Row tiles of a block."""
        return min(BLOCK_TILES, self.num_tiles - block * BLOCK_TILES)

    def idle_engine(self, block: int) -> nisa.engine:
        """Who brings results of a chunk's block from PSUM to SBUF: ACT in the first, short ones."""
        if block < SCALAR_BLOCKS:
            return nisa.engine.scalar
        return nisa.engine.vector

    def row_tile(self, t: int) -> int:
        """Row tile of the chunk that tile t of the share is."""
        return self.share.row_tiles[t // self.share.num_heads]

    def issue(self, macro: Macro, exp_scale: float | nl.NkiTensor) -> None:
        """Scores and weights of a macro; P V of the macro LAG places before."""
        index = len(self.macros)
        scores = self.scores[index % SCORE_BUFFERS]
        weights = self.weights[index % WEIGHT_BUFFERS]
        block = macro.block
        count = len(macro.key_columns)
        columns = self.tiles_of(block) * PARTITIONS
        query = block * MATMUL_COLUMNS
        keys = macro.keys
        for i in range(count):
            skip = macro.first_tiles[i] * PARTITIONS
            key = macro.key_columns[i]
            nisa.nc_matmul(
                dst=scores[:, i * MATMUL_COLUMNS + skip : i * MATMUL_COLUMNS + columns],
                stationary=keys[:, key : key + PARTITIONS],
                moving=self.queries[:, query + skip : query + columns],
                accumulate=False,
            )
        together = count
        if macro.first_tiles[0] != macro.first_tiles[count - 1]:
            together = 1
        for i in range(0, count, together):
            skip = macro.first_tiles[i] * PARTITIONS
            pattern = [
                [KEYS_PER_EXP * MATMUL_COLUMNS, PARTITIONS],
                [MATMUL_COLUMNS, together],
                [1, columns - skip],
            ]
            offset = i * MATMUL_COLUMNS + skip
            nisa.activation(
                dst=weights.ap(pattern, offset=offset), op=nl.exp,
                data=scores.ap(pattern, offset=offset), bias=self.neg_shift, scale=exp_scale,
            )  # fmt: skip
        for i in range(count):
            begin = macro.first_tiles[i]
            heads = macro.diagonal_ends[i] - begin
            if heads > 0:
                # Key p is seen by the queries q >= p of its own row tile.
                first = i * MATMUL_COLUMNS + begin * PARTITIONS
                own = weights[:, first : first + heads * PARTITIONS]
                nisa.affine_select(
                    dst=own, pattern=[[0, heads], [1, PARTITIONS]], channel_multiplier=-1,
                    on_true_tile=own, on_false_value=0.0, cmp_op=nl.greater_equal,
                )  # fmt: skip
        self.macros.append(macro)
        if len(self.macros) - self.retired > LAG:
            self.retire()
        for queue in self.beside:
            for work in queue:
                if work.done < work.steps:
                    work.step()
                    break

    def retire(self) -> None:
        """P V of the oldest macro in flight; after a block's last one, its accumulator."""
        index = self.retired
        macro = self.macros[index]
        weights = self.weights[index % WEIGHT_BUFFERS]
        values = macro.values
        tiles = self.tiles_of(macro.block)
        width = self.d + 1
        for i in range(len(macro.value_columns)):
            value = macro.value_columns[i]
            for t in range(macro.first_tiles[i], tiles):
                column = i * MATMUL_COLUMNS + t * PARTITIONS
                total = t // 2 * MATMUL_COLUMNS + t % 2 * width
                begins = macro.first and i == 0
                nisa.nc_matmul(
                    dst=self.sums[:, total : total + width],
                    stationary=weights[:, column : column + PARTITIONS],
                    moving=values[:, value : value + width],
                    accumulate=not begins,
                )
        if macro.last:
            for t in range(0, tiles, 2):
                both = min(2, tiles - t) * width
                first = (macro.block * BLOCK_TILES + t) * width
                acc = self.acc[:, first : first + both]
                bank = t // 2 * MATMUL_COLUMNS
                total_of_bank = self.sums[:, bank : bank + both]
                if macro.add:
                    nisa.tensor_tensor(dst=acc, data1=total_of_bank, data2=acc, op=nl.add)
                else:
                    nisa.tensor_copy(
                        dst=acc, src=total_of_bank, engine=self.idle_engine(macro.block)
                    )
            if self.result is not None:
                self.result.add_block(macro.block)
        self.retired = self.retired + 1

    def drain(self) -> None:
        """P V of every macro in flight; the next macro starts the rings of buffers anew."""
        while self.retired < len(self.macros):
            self.retire()
        self.macros = []
        self.retired = 0

    def num_keys(self, block: int) -> int:
        """Key tiles of the chunk that a block sees."""
        return self.row_tile(block * BLOCK_TILES + self.tiles_of(block) - 1) + 1

    def shifts_of(self, first: int, end: int) -> nl.NkiTensor:
        """Minus the shifts of some tiles, 128 x tiles."""
        return self.neg_shift.ap([[1, PARTITIONS], [0, end - first]])

    def clear_from(self, block: int) -> None:
        """Zero the accumulators of this block and those after it."""
        first = block * BLOCK_TILES * (self.d + 1)
        if first < self.acc.shape[1]:
            nisa.memset(
                dst=self.acc[:, first : self.acc.shape[1]], value=0.0, engine=nisa.engine.gpsimd
            )

    def attend_chunk(self, keys: nl.NkiTensor, values: nl.NkiTensor, block: int, add: bool) -> None:
        """A block over the chunk's key tiles up to its diagonal; sets its accumulator or adds."""
        first = block * BLOCK_TILES
        tiles = self.tiles_of(block)
        num_keys = self.num_keys(block)
        for key in range(0, num_keys, KEYS_PER_EXP):
            key_columns: list[int] = []
            value_columns: list[int] = []
            first_tiles: list[int] = []
            diagonal_ends: list[int] = []
            for each in range(key, min(key + KEYS_PER_EXP, num_keys)):
                before = 0
                upto = 0
                for t in range(tiles):
                    if self.row_tile(first + t) < each:
                        before = before + 1
                    if self.row_tile(first + t) <= each:
                        upto = upto + 1
                key_columns.append(each * PARTITIONS)
                value_columns.append(each * (self.d + 1))
                first_tiles.append(before)
                diagonal_ends.append(upto)
            self.issue(
                Macro(
                    block, keys, key_columns, first_tiles, diagonal_ends, values, value_columns,
                    key == 0, key + KEYS_PER_EXP >= num_keys, add,
                ),
                self.scale,
            )  # fmt: skip

    def attend_segment(
        self,
        keys: nl.NkiTensor,  # [d, tokens * 128]
        values: nl.NkiTensor,  # [128, tokens * (d + 1)]
        mask: nl.NkiTensor | None,
        tokens: int,
        scale: ScoreScale,
    ) -> None:
        """Every block over one segment of the prior; adds to the accumulators.

        No mask: the values of absent tokens and their ones are zero.
        """
        assert mask is None, "only an exact maximum takes a mask"
        none = [0, 0]
        for block in range(self.num_blocks):
            for key in range(0, tokens, KEYS_PER_EXP):
                key_columns: list[int] = []
                value_columns: list[int] = []
                for each in range(key, min(key + KEYS_PER_EXP, tokens)):
                    key_columns.append(each * PARTITIONS)
                    value_columns.append(each * (self.d + 1))
                self.issue(
                    Macro(
                        block, keys, key_columns, none, none, values, value_columns,
                        key == 0, key + KEYS_PER_EXP >= tokens, True,
                    ),
                    scale.positive,
                )  # fmt: skip

    def spare(self, bank: int, num_rows: int, first: int, columns: int, dtype: str) -> nl.NkiTensor:
        """Columns of the unused end of a P V bank, as `dtype`; `first` counts from that end."""
        per_word = 4 // element_bytes(dtype)
        start = (bank * MATMUL_COLUMNS + 2 * (self.d + 1)) * per_word + first
        return self.sums.ap(
            [[SUM_BANKS * MATMUL_COLUMNS * per_word, num_rows], [1, columns]],
            offset=start, dtype=dtype,
        )  # fmt: skip

    def transpose(
        self,
        tiles: RowTiles,
        first_tile: int,
        num_tiles: int,
        columns: nl.NkiTensor,
        engine: nisa.engine = nisa.engine.vector,
    ) -> None:
        """Row tiles of d features into columns [d, num_tiles * 128], through the spare PSUM."""
        dtype = tiles.rows.dtype
        per_bank = 3
        if dtype == nl.float32:
            per_bank = 1
        for begin in range(0, num_tiles, per_bank):
            count = min(per_bank, num_tiles - begin)
            bank = begin // per_bank % SUM_BANKS
            for t in range(count):
                nisa.nc_transpose(
                    dst=self.spare(bank, self.d, t * PARTITIONS, PARTITIONS, dtype),
                    data=tiles.tile(first_tile + begin + t),
                    engine=nisa.engine.tensor,
                )
            nisa.tensor_copy(
                dst=columns[:, begin * PARTITIONS : (begin + count) * PARTITIONS],
                src=self.spare(bank, self.d, 0, count * PARTITIONS, dtype),
                engine=engine,
            )

    def over_partitions(self, column: nl.NkiTensor, op: Any) -> nl.NkiTensor:
        """[1, 1] fp32: the maximum or minimum of a [128, 1] fp32 column."""
        row = self.spare(0, 1, 0, PARTITIONS, nl.float32)
        nisa.nc_transpose(dst=row, data=column, engine=nisa.engine.tensor)
        number = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=number, op=op, data=row, axis=1, keepdims=True)
        return number


def values_with_ones(
    stage: nl.NkiTensor,  # [128, tiles * d] SBUF
    present: nl.NkiTensor,  # [128, tiles] uint8
    values: nl.NkiTensor,  # [128, tiles * (d + 1)] SBUF, result
    first: int,
    count: int,
) -> None:
    """Value rows of some tiles next to a column of ones; all zero where a row is absent."""
    tiles = present.shape[1]
    d = stage.shape[1] // tiles
    width = tiles * (d + 1)
    nisa.select_reduce(
        dst=values.ap([[width, PARTITIONS], [d + 1, count], [1, d]], offset=first * (d + 1)),
        predicate=present.ap([[tiles, PARTITIONS], [1, count], [0, d]], offset=first),
        on_true=stage[:, first * d : (first + count) * d],
        on_false=0.0,
    )
    nisa.tensor_copy(
        dst=values.ap([[width, PARTITIONS], [d + 1, count], [1, 1]], offset=first * (d + 1) + d),
        src=present[:, first : first + count],
    )
