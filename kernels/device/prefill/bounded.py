"""Bounded softmax: scores transposed, one fixed shift per share, verified at the end.

Keys lie on partitions. Scores of 128 keys against a block of up to 512 queries come out of PE as
[128 keys, 512 queries]; exp goes straight from PSUM to the weights in SBUF, and these are the
stationary operand of P V, whose moving operand is [values | 1]: the last column is the row sum. No
maximum is taken, no weight is transposed, nothing is rescaled.

The shift c of a share is the largest of a sample of its scores minus HEADROOM (shift_estimate.py).
It is an estimate: other scores may be larger, other rows may see smaller ones only. What makes a
result right is the check on the row sum l of every real row,

    SMALLEST_SUM <= l <= LARGEST_SUM, its output is finite,
    and l >= SAFE_SUM or the values of the accumulator add up to SMALLEST_RESULT at least:

every weight of a row has the one factor exp(-c), so what exp flushed to zero is below
N * exp(-87) of a sum that is at least exp(-60), and an overflow shows as infinity or NaN. Products
of such a weight with a small value may be flushed, too; the third condition (share_result.py)
bounds what is lost against what is there. A row that fails raises the flag of its share, and the
exact kernel runs instead.
"""

from dataclasses import dataclass
from typing import Any

from ...backend import nisa, nl
from ...sizes import MATMUL_COLUMNS, PARTITIONS, PSUM_BANKS
from ..loading import RowTiles, element_bytes
from ..softmax import ScoreScale
from .share_tiles import BLOCK_TILES, ShareTiles

KEYS_PER_EXP = 2
"""Key tiles of one exp instruction, a PSUM bank each."""

LAG = 4
"""Macros by which P V trails the scores, so that PE never waits for exp."""

WEIGHT_BUFFERS = 8
"""Weight tiles in SBUF, at least LAG + 1: fewer would overwrite weights before P V reads them."""

SCALAR_BLOCKS = 4
"""Blocks of a chunk whose exp takes less time than what DVE has to do for them."""


@dataclass
class SeenKey(nl.NKIObject):
    """A key tile and the row tiles of a block that see it."""

    column: int  # number of the tile among the key columns and among the values
    begin: int  # first row tile of the block
    end: int
    # Row tiles that see a part of it: first of them, how many, their distance (band.py).
    cuts: list[tuple[int, int, int]]


@dataclass
class Macro(nl.NKIObject):
    """Up to KEYS_PER_EXP key tiles against one block of queries."""

    block: int
    seen: list[SeenKey]
    keys: list[nl.NkiTensor]  # per 128 features [<= 128, ...] key columns
    values: nl.NkiTensor  # [128, ...] values with ones
    first: bool  # begins the block's pass
    last: bool  # ends the block's pass
    add: bool  # the pass adds to the accumulator instead of setting it
    scale: float | nl.NkiTensor


class BoundedRows(nl.NKIObject):
    """The pipeline that fills the accumulators of a share."""

    def __init__(self, tiles: ShareTiles, dtype: str, scale: float) -> None:
        d = tiles.d
        self.tiles = tiles
        self.scale = scale
        self.is_exact = False
        self.scalar_is_free = False
        self.neg_shift = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        # P V of a block: row tiles per PSUM bank, whose end serves transposes, and its banks.
        self.sums_per_bank = 2
        if 2 * (d + 1) > MATMUL_COLUMNS:
            self.sums_per_bank = 1
        self.sum_banks = BLOCK_TILES // self.sums_per_bank
        self.sums = nl.ndarray(
            (PARTITIONS, self.sum_banks * MATMUL_COLUMNS), dtype=nl.float32, buffer=nl.psum
        )
        # The other banks hold scores.
        self.scores: list[nl.NkiTensor] = []
        width = KEYS_PER_EXP * MATMUL_COLUMNS
        for _ in range((PSUM_BANKS - self.sum_banks) // KEYS_PER_EXP):
            self.scores.append(nl.ndarray((PARTITIONS, width), dtype=nl.float32, buffer=nl.psum))
        self.weights: list[nl.NkiTensor] = []
        for _ in range(WEIGHT_BUFFERS):
            self.weights.append(nl.ndarray((PARTITIONS, width), dtype=dtype, buffer=nl.sbuf))
        self.macros: list[Macro] = []
        self.retired = 0
        # Row tiles whose sum in PSUM the current pass has begun.
        self.begun: list[bool] = []
        # Queues of work that is issued in small steps between macros: objects with step, done and
        # steps. Each queue gives one step per macro.
        self.beside: list[list[Any]] = []
        # Told of each block of the chunk that is complete, by add_block.
        self.result: Any = None

    def idle_engine(self, block: int) -> nisa.engine:
        """Who brings results of a chunk's block from PSUM to SBUF: ACT in the first, short ones."""
        if block < SCALAR_BLOCKS:
            return nisa.engine.scalar
        return nisa.engine.vector

    def issue(self, macro: Macro) -> None:
        """Scores and weights of a macro; P V of the macro LAG places before."""
        index = len(self.macros)
        scores = self.scores[index % len(self.scores)]
        weights = self.weights[index % WEIGHT_BUFFERS]
        query = macro.block * MATMUL_COLUMNS
        count = len(macro.seen)
        for i in range(count):
            seen = macro.seen[i]
            begin, end = seen.begin * PARTITIONS, seen.end * PARTITIONS
            key = seen.column * PARTITIONS
            for part in range(len(macro.keys)):
                keys, queries = macro.keys[part], self.tiles.queries[part]
                nisa.nc_matmul(
                    dst=scores[:, i * MATMUL_COLUMNS + begin : i * MATMUL_COLUMNS + end],
                    stationary=keys[:, key : key + PARTITIONS],
                    moving=queries[:, query + begin : query + end],
                    accumulate=part > 0,
                )
        together = count
        first, last = macro.seen[0], macro.seen[count - 1]
        if first.begin != last.begin or first.end != last.end:
            together = 1
        for i in range(0, count, together):
            seen = macro.seen[i]
            pattern = [
                [KEYS_PER_EXP * MATMUL_COLUMNS, PARTITIONS],
                [MATMUL_COLUMNS, together],
                [1, (seen.end - seen.begin) * PARTITIONS],
            ]
            offset = i * MATMUL_COLUMNS + seen.begin * PARTITIONS
            nisa.activation(
                dst=weights.ap(pattern, offset=offset), op=nl.exp,
                data=scores.ap(pattern, offset=offset), bias=self.neg_shift, scale=macro.scale,
            )  # fmt: skip
        for i in range(count):
            cuts = macro.seen[i].cuts
            for cut in cuts:
                begin, tiles, distance = cut
                column = i * MATMUL_COLUMNS + begin * PARTITIONS
                own = weights[:, column : column + tiles * PARTITIONS]
                self.tiles.band.select(own, distance, tiles, True, 0.0)
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
        width = self.tiles.d + 1
        if macro.first:
            self.begun = []
            for _ in range(self.tiles.tiles_of(macro.block)):
                self.begun.append(False)
        for i in range(len(macro.seen)):
            seen = macro.seen[i]
            value = seen.column * width
            for t in range(seen.begin, seen.end):
                column = i * MATMUL_COLUMNS + t * PARTITIONS
                total = self.sum_column(t)
                nisa.nc_matmul(
                    dst=self.sums[:, total : total + width],
                    stationary=weights[:, column : column + PARTITIONS],
                    moving=values[:, value : value + width],
                    accumulate=self.begun[t],
                )
                self.begun[t] = True
        if macro.last:
            self.write_sums(macro)
        self.retired = self.retired + 1

    def sum_column(self, t: int) -> int:
        """Where the P V of row tile t of a block lies."""
        per_bank = self.sums_per_bank
        return t // per_bank * MATMUL_COLUMNS + t % per_bank * (self.tiles.d + 1)

    def write_sums(self, macro: Macro) -> None:
        """Bring the sums of a block to its accumulators, as far as the pass has begun any."""
        width = self.tiles.d + 1
        for t in range(0, len(self.begun), self.sums_per_bank):
            begin, count = t, 0
            for each in range(t, min(t + self.sums_per_bank, len(self.begun))):
                if self.begun[each]:
                    if count == 0:
                        begin = each
                    count = count + 1
            if count > 0:
                first = (macro.block * BLOCK_TILES + begin) * width
                acc = self.tiles.acc[:, first : first + count * width]
                column = self.sum_column(begin)
                total = self.sums[:, column : column + count * width]
                if macro.add:
                    nisa.tensor_tensor(dst=acc, data1=total, data2=acc, op=nl.add)
                else:
                    nisa.tensor_copy(dst=acc, src=total, engine=self.idle_engine(macro.block))
        if self.result is not None:
            self.result.add_block(macro.block)

    def drain(self) -> None:
        """P V of every macro in flight; the next macro starts the rings of buffers anew."""
        while self.retired < len(self.macros):
            self.retire()
        self.macros = []
        self.retired = 0

    def shifts_of(self, first: int, end: int) -> nl.NkiTensor:
        """Minus the shifts of some tiles, 128 x tiles."""
        return self.neg_shift.ap([[1, PARTITIONS], [0, end - first]])

    def clear_from(self, block: int) -> None:
        """Zero the accumulators of this block and those after it."""
        acc = self.tiles.acc
        first = block * BLOCK_TILES * (self.tiles.d + 1)
        if first < acc.shape[1]:
            nisa.memset(dst=acc[:, first : acc.shape[1]], value=0.0, engine=nisa.engine.gpsimd)

    def attend_chunk(
        self, keys: list[nl.NkiTensor], values: nl.NkiTensor, block: int, add: bool
    ) -> None:
        """A block over the chunk's key tiles up to its diagonal; sets its accumulator or adds."""
        oldest = max(0, self.tiles.oldest_key(block * BLOCK_TILES))
        seen: list[SeenKey] = []
        for tile in range(oldest, self.tiles.num_keys(block)):
            self.add_seen(seen, block, tile, tile)
        self.attend_keys(block, seen, keys, values, add, self.scale)

    def attend_segment(
        self,
        keys: list[nl.NkiTensor],  # per 128 features [<= 128, tokens * 128]
        values: nl.NkiTensor,  # [128, tokens * (d + 1)]
        mask: nl.NkiTensor | None,
        tokens: int,
        scale: ScoreScale,
        first_tile: int | None,  # key tile (band.py) of the first; None: every row sees all
    ) -> None:
        """Every block over one segment of the prior; adds to the accumulators.

        No mask: the values of absent tokens and their ones are zero.
        """
        assert mask is None, "only an exact maximum takes a mask"
        for block in range(self.tiles.num_blocks):
            seen: list[SeenKey] = []
            for column in range(tokens):
                if first_tile is None:
                    seen.append(SeenKey(column, 0, self.tiles.tiles_of(block), []))
                else:
                    self.add_seen(seen, block, column, first_tile + column)
            self.attend_keys(block, seen, keys, values, True, scale.positive)

    def add_seen(self, seen: list[SeenKey], block: int, column: int, tile: int) -> None:
        """Add a key tile to `seen` if some row tile of the block sees it."""
        band = self.tiles.band
        begin, end = 0, 0
        cuts: list[tuple[int, int, int]] = []
        for t in range(self.tiles.tiles_of(block)):
            distance = self.tiles.row_tile(block * BLOCK_TILES + t) - tile
            if band.sees(distance):
                if end == 0:
                    begin = t
                end = t + 1
                if band.is_cut(distance):
                    num = len(cuts)
                    if num > 0 and cuts[num - 1][2] == distance:
                        cuts[num - 1] = (cuts[num - 1][0], cuts[num - 1][1] + 1, distance)
                    else:
                        cuts.append((t, 1, distance))
        if end > 0:
            seen.append(SeenKey(column, begin, end, cuts))

    def attend_keys(
        self,
        block: int,
        seen: list[SeenKey],
        keys: list[nl.NkiTensor],
        values: nl.NkiTensor,
        add: bool,
        scale: float | nl.NkiTensor,
    ) -> None:
        """A block over some key tiles."""
        for first in range(0, len(seen), KEYS_PER_EXP):
            end = min(first + KEYS_PER_EXP, len(seen))
            own: list[SeenKey] = []
            for i in range(first, end):
                own.append(seen[i])
            self.issue(Macro(block, own, keys, values, first == 0, end == len(seen), add, scale))

    def spare(self, bank: int, num_rows: int, first: int, columns: int, dtype: str) -> nl.NkiTensor:
        """Columns of the unused end of a P V bank, as `dtype`; `first` counts from that end."""
        per_word = 4 // element_bytes(dtype)
        used = self.sums_per_bank * (self.tiles.d + 1)
        start = (bank * MATMUL_COLUMNS + used) * per_word + first
        return self.sums.ap(
            [[self.sum_banks * MATMUL_COLUMNS * per_word, num_rows], [1, columns]],
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
        """Row tiles into columns [height, num_tiles * 128], through the spare PSUM."""
        dtype = tiles.rows.dtype
        per_bank = 3
        if dtype == nl.float32:
            per_bank = 1
        for begin in range(0, num_tiles, per_bank):
            count = min(per_bank, num_tiles - begin)
            bank = begin // per_bank % self.sum_banks
            for t in range(count):
                nisa.nc_transpose(
                    dst=self.spare(bank, tiles.width, t * PARTITIONS, PARTITIONS, dtype),
                    data=tiles.tile(first_tile + begin + t),
                    engine=nisa.engine.tensor,
                )
            nisa.tensor_copy(
                dst=columns[:, begin * PARTITIONS : (begin + count) * PARTITIONS],
                src=self.spare(bank, tiles.width, 0, count * PARTITIONS, dtype),
                engine=engine,
            )

    def over_partitions(self, column: nl.NkiTensor, op: Any, number: nl.NkiTensor) -> None:
        """Set `number` [1, 1] to the maximum or minimum of a [128, 1] fp32 column."""
        row = self.spare(0, 1, 0, PARTITIONS, nl.float32)
        nisa.nc_transpose(dst=row, data=column, engine=nisa.engine.tensor)
        nisa.tensor_reduce(dst=number, op=op, data=row, axis=1, keepdims=True)
