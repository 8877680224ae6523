"""Rule "loop_psum": PSUM that crosses the edge of a device loop.

PSUM that only other engines write may cross it, and so may SBUF and HBM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..storage import Storage
from ..strict import violation

if TYPE_CHECKING:
    from ..core import Core


def note_tensor_engine_write(me: str, core: Core, storage: Storage) -> None:
    """The Tensor Engine writes PSUM: inside a loop it must have been allocated by the same body."""
    psum = storage.psum
    assert psum is not None
    psum.by_tensor_engine = True
    region = core.region
    if region is not None and storage.born < region.born:
        violation(
            "loop_psum",
            f"{me}: dst {storage.name!r} in PSUM was allocated outside {region.name} of line "
            f"{region.line[1]}, whose body writes it on the Tensor Engine; allocate it in the body "
            "and carry sums in SBUF",
        )


def check_psum_in_loop(me: str, core: Core, storage: Storage) -> None:
    """An instruction of a loop uses PSUM: no other loop may have used the same tile."""
    psum, region = storage.psum, core.region
    assert psum is not None
    assert region is not None
    if psum.region is None:
        psum.region = region
    elif psum.by_tensor_engine and not psum.region.same_as(region):
        violation(
            "loop_psum",
            f"{me}: {storage.name!r} in PSUM is used by {region.name} of line {region.line[1]} and "
            f"by {psum.region.name} of line {psum.region.line[1]}; allocate one tile in each body",
        )
