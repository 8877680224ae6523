"""Tiles in PSUM and SBUF, and the way between rows and columns.

Every accumulation chain and every group of transposes has a PSUM tile of its own, one bank, made
where it is used: inside a device loop if it is used there.
"""

from collections.abc import Sequence

from ...backend import nisa, nl
from ...sizes import PARTITIONS, PSUM_BANK_BYTES
from ..loading import element_bytes

Columns = list[nl.NkiTensor]
"""Columns of some row tiles: [<= 128 features, tiles * 128] per 128 features."""


def psum_bank(dtype: str = nl.float32) -> nl.NkiTensor:
    """A new PSUM tile, [128, 512] fp32 or [128, 1024] of a 2-byte type."""
    shape = (PARTITIONS, PSUM_BANK_BYTES // element_bytes(dtype))
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum)


def sbuf(shape: tuple[int, ...], dtype: str = nl.float32) -> nl.NkiTensor:
    """A new tile in SBUF."""
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def new_columns(num_tiles: int, d: int, dtype: str) -> Columns:
    """Unwritten columns of some tiles."""
    width = num_tiles * PARTITIONS
    return [sbuf((min(PARTITIONS, d - f), width), dtype) for f in range(0, d, PARTITIONS)]


def transpose(tiles: Sequence[nl.NkiTensor], columns: nl.NkiTensor, engine: nisa.engine) -> None:
    """Tiles [128, height] side by side into columns [height, tiles * 128], by way of PSUM."""
    dtype = tiles[0].dtype
    per_bank = PSUM_BANK_BYTES // (element_bytes(dtype) * PARTITIONS)
    height = columns.shape[0]
    for begin in range(0, len(tiles), per_bank):
        bank = psum_bank(dtype)
        some = tiles[begin : begin + per_bank]
        for i, tile in enumerate(some):
            nisa.nc_transpose(
                dst=bank[0:height, i * PARTITIONS : i * PARTITIONS + tile.shape[0]], data=tile,
                engine=nisa.engine.tensor,
            )  # fmt: skip
        width = sum(tile.shape[0] for tile in some)
        first = begin * PARTITIONS
        nisa.tensor_copy(
            dst=columns[:, first : first + width], src=bank[0:height, 0:width], engine=engine
        )


def transpose_features(
    rows: nl.NkiTensor,  # [128, tiles * d] SBUF
    first: int,
    num: int,
    columns: Columns,  # of `num` tiles, result
    engine: nisa.engine = nisa.engine.vector,
) -> None:
    """Row tiles first .. first + num - 1 as columns, 128 features at a time."""
    d = sum(part.shape[0] for part in columns)
    begin = 0
    for part in columns:
        height = part.shape[0]
        tiles = [
            rows[:, (first + t) * d + begin : (first + t) * d + begin + height] for t in range(num)
        ]
        transpose(tiles, part, engine)
        begin += height


def over_partitions(column: nl.NkiTensor, op: object, number: nl.NkiTensor) -> None:
    """Set `number` [1, 1] to the maximum or minimum of a [128, 1] fp32 column."""
    row = psum_bank()[0:1, 0:PARTITIONS]
    nisa.nc_transpose(dst=row, data=column, engine=nisa.engine.tensor)
    nisa.tensor_reduce(dst=number, op=op, data=row, axis=1, keepdims=True)
