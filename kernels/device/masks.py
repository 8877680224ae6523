"""Predicates (uint8 tiles) for keys and rows, from positions and runtime counts.

Positions are exact in fp32: they stay far below 2**24.
"""

from ..backend import nisa, nl
from ..sizes import PARTITIONS
from .tile_schedule import Share


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
