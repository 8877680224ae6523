"""Keys and values that the softmax multiplies with, made piece by piece while others are used."""

from dataclasses import dataclass

from ...backend import nl
from ...sizes import PARTITIONS
from ..softmax import ScoreScale
from .background import Pieces
from .on_chip import Columns, new_columns, sbuf

PIECE_TILES = 4
"""kv_tiles of a piece, which has tensors of its own: a PSUM bank of transposed keys."""


@dataclass
class KvPiece:
    """Up to PIECE_TILES kv_tiles."""

    keys: Columns
    values: nl.NkiTensor
    """[128, tiles * (value_dim + 1)]: values, each row with a one behind it; zero where absent."""


def new_pieces(num_tiles: int, d: int, value_dim: int, dtype: str) -> list[KvPiece]:
    """Unwritten pieces of some kv_tiles."""
    sizes = [min(PIECE_TILES, num_tiles - t) for t in range(0, num_tiles, PIECE_TILES)]
    return [
        KvPiece(new_columns(size, d, dtype), sbuf((PARTITIONS, size * (value_dim + 1)), dtype))
        for size in sizes
    ]


@dataclass(eq=False)
class KvTiles:
    """kv_tiles of a chunk or of a segment of the prior."""

    pieces: list[KvPiece]
    value_dim: int
    count: int
    scale: ScoreScale
    """Of the raw scores against these keys."""
    first_tile: int | None
    """kv_tile (band.py) of the first one; None: every row sees all."""
    absent: nl.NkiTensor | None = None
    """[1, count * 128] bf16, added to the scores: MASKED where a key is absent."""
    making: Pieces | None = None
    """Who makes the pieces; None: they are there."""

    def ready(self, tile: int) -> None:
        """Issue what a kv_tile still needs."""
        if self.making is not None:
            self.making.until(tile // PIECE_TILES + 1)

    def keys(self, first: int, end: int, part: int) -> nl.NkiTensor:
        """Columns of kv_tiles of one piece, 128 features."""
        begin = first // PIECE_TILES * PIECE_TILES
        return self.pieces[first // PIECE_TILES].keys[part][
            :, (first - begin) * PARTITIONS : (end - begin) * PARTITIONS
        ]

    def values(self, tile: int) -> nl.NkiTensor:
        """[128, value_dim + 1] of a kv_tile."""
        width = self.value_dim + 1
        first = tile % PIECE_TILES * width
        return self.pieces[tile // PIECE_TILES].values[:, first : first + width]

    def mask(self, first: int, end: int) -> nl.NkiTensor | None:
        """Of some kv_tiles, [1, tiles * 128]."""
        if self.absent is None:
            return None
        return self.absent[:, first * PARTITIONS : end * PARTITIONS]
