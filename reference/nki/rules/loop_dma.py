"""Rules "loop_dge" and "loop_skip": DMA in the body of a device loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..strict import violation

if TYPE_CHECKING:
    from .regions import LoopRegion


def check_loop_dma(me: str, region: LoopRegion, *, static: bool, skips: bool) -> None:
    """`static`: descriptors made by the host; `skips`: rows out of bounds are left out."""
    where = f"in the body of {region.name} of line {region.line[1]}"
    if static:
        violation(
            "loop_dge",
            f"{me}: dge_mode.none {where}; allowed in a loop: unknown, hwdge, swdge",
        )
    if skips:
        violation(
            "loop_skip",
            f"{me}: oob_mode.skip {where}; point rows without data at a spare row, or leave SBUF "
            "headroom so that the destination is never spilled",
        )
