"""Predicates (uint8 tiles) for keys and rows, from positions and runtime counts.

Positions are exact in fp32: they stay far below 2**24.
"""

from .backend import nisa, nl
from .tile_schedule import PARTITIONS


def valid_rows(num_tokens: nl.NkiTensor, num_tiles: int) -> nl.NkiTensor:
    """[128, num_tiles] uint8: row t * 128 + p is one of the `num_tokens` [128, 1] real ones."""
    rows = nl.ndarray((PARTITIONS, num_tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(rows, [[PARTITIONS, num_tiles]], offset=0, channel_multiplier=1)
    valid = nl.ndarray((PARTITIONS, num_tiles), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=valid, data=rows, op0=nl.less, operand0=num_tokens)
    return valid


def causal_mask(num_tiles: int) -> nl.NkiTensor:
    """[128, num_tiles * 128] whose last tile is the diagonal: column c is seen by row p of it."""
    width = num_tiles * PARTITIONS
    behind = nl.ndarray((PARTITIONS, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(behind, [[-1, width]], offset=width - PARTITIONS, channel_multiplier=1)
    seen = nl.ndarray((PARTITIONS, width), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=seen, data=behind, op0=nl.greater_equal, operand0=0.0)
    return seen


def segment_positions(num_tokens: int) -> nl.NkiTensor:
    """[128, num_tokens] fp32: 0, 1, 2, ... on every partition."""
    positions = nl.ndarray((PARTITIONS, num_tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(positions, [[1, num_tokens]], offset=0, channel_multiplier=0)
    return positions


def segment_partition_positions(tokens: int) -> nl.NkiTensor:
    """[128, tokens] fp32: position p * tokens + j of the token at slot j of partition p."""
    positions = nl.ndarray((PARTITIONS, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(positions, [[1, tokens]], offset=0, channel_multiplier=tokens)
    return positions


def present_tokens(
    positions: nl.NkiTensor,  # [P, n] fp32
    remaining: nl.NkiTensor,  # [P, 1] fp32: tokens at positions below it exist
    blocks: nl.NkiTensor,  # P x n int32: the token's block, -1 = absent
) -> nl.NkiTensor:
    """[P, n] uint8: the token exists and its block is mapped."""
    mapped = nl.ndarray(positions.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=mapped, data=blocks, op0=nl.greater_equal, operand0=0.0)
    present = nl.ndarray(positions.shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=present,
        data=positions,
        op0=nl.less,
        operand0=remaining,
        op1=nl.multiply,
        operand1=mapped,
    )
    return present


def own_head_mask(num_heads: int, rows_per_head: int) -> nl.NkiTensor:
    """[num_heads * rows_per_head, num_heads] uint8: the row's KV head is the column."""
    shape = (num_heads * rows_per_head, num_heads)
    offset = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(offset, [[-rows_per_head, num_heads]], offset=0, channel_multiplier=1)
    started = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=started, data=offset, op0=nl.greater_equal, operand0=0.0)
    own = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=own, data=offset, op0=nl.less, operand0=float(rows_per_head), op1=nl.multiply,
        operand1=started,
    )  # fmt: skip
    return own
