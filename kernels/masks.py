"""Predicates (uint8 tiles) for keys and rows, from positions and runtime counts.

Positions are exact in fp32: they stay far below 2**24.
"""

from .backend import nisa, nl
from .tile_schedule import MACRO_TILES, PARTITIONS, Share


def valid_rows(num_tokens: nl.NkiTensor, num_tiles: int) -> nl.NkiTensor:
    """[128, tiles] uint8: row tile * 128 + p is one of the `num_tokens` [128, 1] real ones."""
    rows = nl.ndarray((PARTITIONS, num_tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(rows, [[PARTITIONS, num_tiles]], offset=0, channel_multiplier=1)
    valid = nl.ndarray((PARTITIONS, num_tiles), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=valid, data=rows, op0=nl.less, operand0=num_tokens)
    return valid


def share_rows(
    every_valid: nl.NkiTensor,  # [128, S / 128] uint8
    share: Share,
) -> nl.NkiTensor:
    """The columns of a share's row tiles, [128, tiles] uint8."""
    row_tiles = share.row_tiles
    first, last = row_tiles[0], row_tiles[len(row_tiles) - 1]
    if last - first + 1 == len(row_tiles):
        return every_valid[:, first : last + 1]
    valid = nl.ndarray((PARTITIONS, len(row_tiles)), dtype=nl.uint8, buffer=nl.sbuf)
    for i in range(len(row_tiles)):
        tile = row_tiles[i]
        nisa.tensor_copy(dst=valid[:, i : i + 1], src=every_valid[:, tile : tile + 1])
    return valid


def chunk_mask(num_tiles: int, tiles_behind: int, window: int | None) -> nl.NkiTensor:
    """[128, num_tiles * 128] uint8: which keys of a chunk row p of a row tile sees.

    The last of the `num_tiles` key tiles lies `tiles_behind` row tiles before the row tile (0: it
    is the diagonal). A row sees itself and what is before it, `window` keys at most.
    """
    width = num_tiles * PARTITIONS
    behind = nl.ndarray((PARTITIONS, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(
        behind, [[-1, width]], offset=width - PARTITIONS + tiles_behind * PARTITIONS,
        channel_multiplier=1,
    )  # fmt: skip
    seen = nl.ndarray((PARTITIONS, width), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=seen, data=behind, op0=nl.greater_equal, operand0=0.0)
    if window is None:
        return seen
    near = nl.ndarray((PARTITIONS, width), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=near, data=behind, op0=nl.less, operand0=float(window), op1=nl.multiply, operand1=seen
    )
    return near


def chunk_masks(num_tiles: int, window: int | None) -> list[nl.NkiTensor | None]:
    """chunk_mask of each step of MACRO_TILES key tiles before the diagonal; None: all are seen.

    Steps that lie outside the window altogether are left out.
    """
    masks: list[nl.NkiTensor | None] = []
    tiles = min(num_tiles, MACRO_TILES)
    for first in range(0, num_tiles, MACRO_TILES):
        oldest = (first + tiles) * PARTITIONS  # no key of the step is further behind
        if first == 0 or (window is not None and oldest > window):
            if window is None or first * PARTITIONS < window + PARTITIONS - 1:
                masks.append(chunk_mask(tiles, first, window))
        else:
            masks.append(None)
    return masks


def positions_on_partitions(tokens: int) -> nl.NkiTensor:
    """[128, tokens] fp32: position p * tokens + j of the token at slot j of partition p."""
    positions = nl.ndarray((PARTITIONS, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(positions, [[1, tokens]], offset=0, channel_multiplier=tokens)
    return positions


def present_tokens(
    positions: nl.NkiTensor,  # [P, n] fp32
    limit: nl.NkiTensor,  # [P, 1] fp32: tokens at positions below it are meant
    blocks: nl.NkiTensor,  # P x n int32: the token's block, -1 = absent
    present: nl.NkiTensor,  # [P, n] uint8, result
) -> None:
    """Which tokens are below the limit and in a mapped block."""
    mapped = nl.ndarray(positions.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=mapped, data=blocks, op0=nl.greater_equal, operand0=0.0)
    nisa.scalar_tensor_tensor(
        dst=present, data=positions, op0=nl.less, operand0=limit, op1=nl.multiply, operand1=mapped
    )


def from_position(
    positions: nl.NkiTensor,  # [P, n] fp32
    first: nl.NkiTensor,  # [P, 1] fp32
    seen: nl.NkiTensor,  # [P, n] uint8
) -> nl.NkiTensor:
    """[P, n] uint8: `seen`, at positions from `first` on."""
    near = nl.ndarray(positions.shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=near, data=positions, op0=nl.greater_equal, operand0=first, op1=nl.multiply,
        operand1=seen,
    )  # fmt: skip
    return near
