"""Rules "dma_reshape", "dma_cast" and "transpose_rows": what a DMA makes of shapes and dtypes."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import Final

from ..dtypes import DEVICE_ITEMSIZE, INTEGERS
from ..strict import violation
from ..tensor import NkiTensor

_ROW_BYTES: Final = 32


def is_plain_copy(dst: NkiTensor, src: NkiTensor) -> bool:
    """Whether nothing about shapes and dtypes of a copy is suspicious."""
    return not _rounds(dst, src) and _cut(dst, src) is None


def _rounds(dst: NkiTensor, src: NkiTensor) -> bool:
    """Whether floats become integers."""
    return dst.dtype in INTEGERS and src.dtype not in INTEGERS


def _cut(dst: NkiTensor, src: NkiTensor) -> NkiTensor | None:
    """The side whose partitions cut through rows of the other."""
    for tile, other in ((dst, src), (src, dst)):
        if tile.v.layout.on_chip and not _partitions_are_rows(tile, other):
            return tile
    return None


def check_copied_shapes(me: str, dst: NkiTensor, src: NkiTensor) -> None:
    """Elements go in row-major order: a partition should hold whole rows of the other side."""
    tile = _cut(dst, src)
    if tile is not None:
        violation(
            "dma_reshape",
            f"{me}: dst of shape {dst.shape} and src of shape {src.shape} differ in more than "
            f"their free dimensions: the {tile.shape[0]} partitions of {tile.name!r} cut through "
            "rows of the other; reshape or transpose explicitly",
        )
    if _rounds(dst, src):
        violation(
            "dma_cast",
            f"{me}: casts {src.dtype} to {dst.dtype} on the way; if the bits are meant, use "
            ".view(dtype), else cast with nisa.tensor_copy",
        )


def _partitions_are_rows(tile: NkiTensor, other: NkiTensor) -> bool:
    """Whether the partitions of a tile end where a dimension of the other side ends."""
    shape = [n for n in other.shape if n != 1]
    if other.v.layout.on_chip:
        return tile.shape[0] == other.shape[0]
    return len(shape) < 2 or tile.shape[0] in accumulate(shape, mul, initial=1)


def check_transposed_rows(me: str, dst: NkiTensor) -> None:
    """Rows of a DMA transpose's destination are a multiple of 32 bytes apart."""
    layout = dst.v.layout
    nbytes = layout.row * DEVICE_ITEMSIZE[layout.dtype]
    if layout.partitions > 1 and nbytes % _ROW_BYTES:
        violation(
            "transpose_rows",
            f"{me}: the rows of dst {dst.name!r} are {nbytes} bytes apart; allowed: multiples of "
            f"{_ROW_BYTES} (make the tile's rows longer and use a part of them)",
        )
