"""Rules on rows that are scattered or left out by their run-time index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ..dtypes import Array
from ..regions import HBM
from ..storage import Storage
from ..strict import violation
from ..tensor import NkiTensor

if TYPE_CHECKING:
    from ..core import Core

_NEGATIVE: Final = 2**31
"""First unsigned index that is negative as int32."""


def check_skipped_rows(me: str, operand: str, name: str, indices: Array) -> None:
    """Rule "negative_row": of the rows below 0, -1 (0xFFFFFFFF) is known to be left out."""
    signed = np.where(indices >= _NEGATIVE, indices - 2**32, indices)
    computed = signed[signed < -1]
    if computed.size:
        violation(
            "negative_row",
            f"{me}: operand {operand} {name!r} leaves out row {int(computed[0])}; of the negative "
            "rows only -1 is documented as out of bounds: clamp it, or use a row past the end",
        )


def check_hbm_scatter(me: str, dst: NkiTensor, src: NkiTensor) -> None:
    """Rule "hbm_scatter"."""
    if src.buffer in HBM:
        violation(
            "hbm_scatter",
            f"{me}: scatters rows of {src.name!r} in {src.buffer.value} to rows of {dst.name!r} in "
            "HBM; go through a tile in SBUF",
        )


def check_scatter_add(me: str, core: Core, storage: Storage, skipped: int) -> None:
    """Rules "scatter_add_skip" and "scatter_add_after_copy"."""
    if skipped:
        violation(
            "scatter_add_skip",
            f"{me}: the scatter-add to {storage.name!r} leaves out {skipped} rows whose index is "
            "out of bounds; send them to distinct spare rows of the tensor",
        )
    line, storage.copied_at = storage.copied_at, 0
    if line and core.num_cores == 2:
        violation(
            "scatter_add_after_copy",
            f"{me}: scatter-add to {storage.name!r}, into which the dma_copy of line {line} has "
            "just copied; put nisa.core_barrier on the tensor between",
        )
