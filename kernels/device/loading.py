"""Rows in and out of SBUF, with their padding replaced.

Rows that must not matter may hold NaN or infinity, so they are replaced by zero with a select; a
multiplication would keep the NaN.
"""

from collections.abc import Sequence

from ..backend import nisa, nl
from ..sizes import PARTITIONS


def broadcast_row(numbers: nl.NkiTensor) -> nl.NkiTensor:
    """A [1, n] HBM row in fp32 on every partition, [128, n]."""
    count = numbers.shape[1]
    stored = nl.ndarray((PARTITIONS, count), dtype=numbers.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=stored, src=numbers.ap([[0, PARTITIONS], [1, count]]))
    if numbers.dtype == nl.float32:
        return stored
    tile = nl.ndarray((PARTITIONS, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=tile, src=stored)
    return tile


def inverse_scales(scales: nl.NkiTensor | None) -> nl.NkiTensor | None:
    """Reciprocals of [1, KV] HBM scales on every partition, [128, KV] fp32."""
    if scales is None:
        return None
    inverse = broadcast_row(scales)
    nisa.reciprocal(dst=inverse, data=inverse)
    return inverse


def row_tile_view(
    hbm: nl.NkiTensor,  # [heads, S, d]
    first_head: int,
    num_heads: int,
    first_tile: int,
    num_tiles: int,
) -> nl.NkiTensor:
    """Row tiles of consecutive heads in HBM as [128, row tile, head, d]."""
    _, num_rows, d = hbm.shape
    return hbm.ap(
        [[d, PARTITIONS], [PARTITIONS * d, num_tiles], [num_rows * d, num_heads], [1, d]],
        offset=(first_head * num_rows + first_tile * PARTITIONS) * d,
    )


def runs_of(row_tiles: Sequence[int], first: int, count: int) -> list[tuple[int, int]]:
    """Entries first .. first + count - 1 of a list of row tiles as runs that follow each other.

    One run, or single entries: (index of the first, how many).
    """
    if row_tiles[first + count - 1] - row_tiles[first] == count - 1:
        return [(first, count)]
    return [(i, 1) for i in range(first, first + count)]


def each_element(
    valid: nl.NkiTensor,  # [128, tiles] uint8
    first: int,
    count: int,
    d: int,
) -> nl.NkiTensor:
    """A predicate for every element of `count` tiles of d columns."""
    return valid.ap([[valid.shape[1], PARTITIONS], [1, count], [0, d]], offset=first)


def values_with_ones(
    rows: nl.NkiTensor,  # 128 x count * d SBUF
    present: nl.NkiTensor,  # [128, tiles] uint8
    first: int,
    count: int,
    values: nl.NkiTensor,  # [128, count * (d + 1)] SBUF, result
) -> None:
    """Value rows of some tiles next to a column of ones; all zero where a row is absent."""
    width = values.shape[1]
    d = width // count - 1
    nisa.select_reduce(
        dst=values.ap([[width, PARTITIONS], [d + 1, count], [1, d]]),
        predicate=each_element(present, first, count, d), on_true=rows, on_false=0.0,
    )  # fmt: skip
    nisa.tensor_copy(
        dst=values.ap([[width, PARTITIONS], [d + 1, count], [1, 1]], offset=d),
        src=present[:, first : first + count],
    )


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a floating dtype that PE moves."""
    return 4 if dtype == nl.float32 else 2
