"""Predicates (uint8 tiles) for keys and rows, from positions and runtime counts.

Positions are exact in fp32: they stay far below 2**24.
"""

from ..backend import nisa, nl
from ..sizes import MASKED, PARTITIONS
from .loading import runs_of
from .tile_schedule import QGroup


def valid_rows(num_tokens: nl.NkiTensor, num_tiles: int) -> nl.NkiTensor:
    """[128, tiles] uint8: row tile * 128 + p is one of the `num_tokens` [128, 1] real ones."""
    rows = nl.ndarray((PARTITIONS, num_tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(rows, [[PARTITIONS, num_tiles]], offset=0, channel_multiplier=1)
    valid = nl.ndarray((PARTITIONS, num_tiles), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=valid, data=rows, op0=nl.less, operand0=num_tokens)
    return valid


def absent_rows(num_tokens: nl.NkiTensor, num_rows: int) -> nl.NkiTensor:
    """[1, num_rows] bf16: MASKED from row `num_tokens` [128, 1] on, else 0."""
    rows = nl.ndarray((1, num_rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(rows, [[1, num_rows]], offset=0, channel_multiplier=0)
    absent = nl.ndarray((1, num_rows), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=absent, data=rows, op0=nl.greater_equal, operand0=num_tokens[0:1, :], op1=nl.multiply,
        operand1=MASKED,
    )  # fmt: skip
    return absent


def q_tile_rows(every_valid: nl.NkiTensor, group: QGroup) -> nl.NkiTensor:
    """Of [128, S / 128] the columns of a q_group, [128, q_tiles] uint8: one for each q_tile."""
    heads, tiles = group.num_heads, group.row_tiles
    valid = nl.ndarray((PARTITIONS, group.num_tiles), dtype=nl.uint8, buffer=nl.sbuf)
    for tile, length in runs_of(tiles, 0, len(tiles)):
        nisa.tensor_copy(
            dst=valid[:, tile * heads : (tile + length) * heads],
            src=every_valid.ap(
                [[every_valid.shape[1], PARTITIONS], [1, length], [0, heads]], offset=tiles[tile]
            ),
        )
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
