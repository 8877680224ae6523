"""Rules "loop_dge" and "loop_skip": DMA in the body of a device loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..regions import SBUF
from ..strict import violation
from ..tensor import NkiTensor

if TYPE_CHECKING:
    from .regions import LoopRegion


def check_loop_dma(
    me: str, region: LoopRegion, dst: NkiTensor, *, static: bool, skips: bool
) -> None:
    """`static`: descriptors made by the host; `skips`: rows out of bounds are left out.

    What the compiler places in SBUF may be spilled; a tile with an address, as in AWS's segmented
    attention, and a tensor in HBM are not.
    """
    where = f"in the body of {region.name} of line {region.line[1]}"
    if static:
        violation(
            "loop_dge",
            f"{me}: dge_mode.none {where}; allowed in a loop: unknown, hwdge, swdge",
        )
    if skips and dst.buffer is SBUF and not dst.storage.in_arena:
        violation(
            "loop_skip",
            f"{me}: oob_mode.skip {where} to {dst.name!r}, which the compiler may want to spill; "
            "give it an address, or point rows without data at a spare row",
        )
