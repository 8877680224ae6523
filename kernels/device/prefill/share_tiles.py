"""The rows of a share on chip: query columns and accumulators, whatever the softmax."""

from ...backend import nl
from ...sizes import MATMUL_COLUMNS, PARTITIONS
from ..loading import new_columns
from ..tile_schedule import Share
from .band import Band

BLOCK_TILES = MATMUL_COLUMNS // PARTITIONS
"""Row tiles of a block: its 512 query columns are the moving operand of a matmul."""


def num_blocks_of(share: Share) -> int:
    """Blocks of a share's row tiles."""
    tiles = share.num_heads * len(share.row_tiles)
    return (tiles + BLOCK_TILES - 1) // BLOCK_TILES


class ShareTiles(nl.NKIObject):
    """Row tile t = i * num_heads + h is tile row_tiles[i] of head h of the share.

    An accumulator has d columns of weighted values and the row sum in its last column.
    """

    def __init__(self, share: Share, d: int, dtype: str, window: int | None) -> None:
        self.share = share
        self.num_tiles = share.num_heads * len(share.row_tiles)
        self.num_blocks = num_blocks_of(share)
        self.d = d
        self.band = Band(window)
        # Per 128 features, [<= 128, num_tiles * 128].
        self.queries = new_columns(self.num_tiles, d, dtype)
        self.acc = nl.ndarray(
            (PARTITIONS, self.num_tiles * (d + 1)), dtype=nl.float32, buffer=nl.sbuf
        )

    def tiles_of(self, block: int) -> int:
        """Row tiles of a block."""
        return min(BLOCK_TILES, self.num_tiles - block * BLOCK_TILES)

    def row_tile(self, t: int) -> int:
        """Row tile of the chunk that tile t of the share is."""
        return self.share.row_tiles[t // self.share.num_heads]

    def num_keys(self, block: int) -> int:
        """Key tiles of the chunk up to the last one that a block sees."""
        return self.row_tile(block * BLOCK_TILES + self.tiles_of(block) - 1) + 1

    def oldest_key(self, t: int) -> int:
        """First key tile that tile t sees, negative before the chunk."""
        return self.row_tile(t) - self.band.reach

    def num_seen(self, block: int) -> int:
        """Key tiles of the chunk that a block is computed with."""
        return self.num_keys(block) - max(0, self.oldest_key(block * BLOCK_TILES))

    def sums(self, first: int, end: int) -> nl.NkiTensor:
        """Row sums of some tiles, [128, tiles]."""
        width = self.d + 1
        return self.acc.ap(
            [[self.num_tiles * width, PARTITIONS], [width, end - first]],
            offset=first * width + self.d,
        )
