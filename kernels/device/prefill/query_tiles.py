"""The queries of a q_group on chip: columns and accumulators, whatever the softmax."""

from dataclasses import dataclass, field

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..tile_schedule import Q_BLOCK_TILES, QGroup
from .band import Band
from .on_chip import Columns, new_columns, sbuf


@dataclass
class QueryTiles:
    """Tile by tile: each q_block has tensors of its own, so that one is written beside another.

    An accumulator has value_dim columns of weighted values and the row_sum in its last column.
    """

    group: QGroup
    d: int
    value_dim: int
    dtype: str
    band: Band
    columns: list[Columns] = field(init=False)
    """Query columns of each q_block."""
    acc: list[nl.NkiTensor] = field(init=False)
    """[128, q_tiles * (value_dim + 1)] fp32 of each q_block."""
    neg_max: list[nl.NkiTensor] = field(init=False)
    """[128, 1] fp32 of each q_tile: minus the shift of its scores, times the scale."""

    def __post_init__(self) -> None:
        blocks = [self.group.tiles_of(block) for block in range(self.group.num_blocks)]
        self.columns = [new_columns(n, self.d, self.dtype) for n in blocks]
        self.acc = [sbuf((PARTITIONS, n * (self.value_dim + 1))) for n in blocks]
        self.neg_max = []

    def query(self, t: int, part: int) -> nl.NkiTensor:
        """Columns of a q_tile."""
        first = t % Q_BLOCK_TILES * PARTITIONS
        return self.columns[t // Q_BLOCK_TILES][part][:, first : first + PARTITIONS]

    def accumulator(self, t: int) -> nl.NkiTensor:
        """[128, value_dim + 1] of a q_tile."""
        width = self.value_dim + 1
        first = t % Q_BLOCK_TILES * width
        return self.acc[t // Q_BLOCK_TILES][:, first : first + width]

    def seen(self, t: int, first_tile: int, count: int) -> range:
        """Which of `count` kv_tiles from `first_tile` on a q_tile sees."""
        if not self.band.causal:
            return range(count)
        tile = self.group.row_tile(t)
        begin = max(0, tile - self.band.reach - first_tile)
        return range(begin, min(count, tile + 1 - first_tile))

    def seen_of_chunk(self, block: int, count: int) -> range:
        """Which of the chunk's `count` kv_tiles some q_tile of a q_block sees."""
        first = block * Q_BLOCK_TILES
        last = first + self.group.tiles_of(block) - 1
        return range(self.seen(first, 0, count).start, self.seen(last, 0, count).stop)

    def scale_values(self, factor: nl.NkiTensor) -> None:
        """Multiply the value columns of the accumulators by a [128, 1] factor, not the row_sums."""
        width = self.value_dim + 1
        for acc in self.acc:
            n = acc.shape[1] // width
            own = acc.ap([[n * width, PARTITIONS], [width, n], [1, self.value_dim]])
            nisa.tensor_scalar(dst=own, data=own, op0=nl.multiply, operand0=factor)

    def copy_row_sums(self, first: int, end: int, sums: nl.NkiTensor) -> None:
        """Row_sums of some q_tiles into the same columns of `sums` [128, q_tiles]."""
        width = self.value_dim + 1
        for block, acc in enumerate(self.acc):
            begin = block * Q_BLOCK_TILES
            low, high = max(first, begin), min(end, begin + acc.shape[1] // width)
            if low < high:
                nisa.tensor_copy(
                    dst=sums[:, low:high],
                    src=acc.ap(
                        [[acc.shape[1], PARTITIONS], [width, high - low]],
                        offset=(low - begin) * width + self.value_dim,
                    ),
                    engine=nisa.engine.vector,
                )
