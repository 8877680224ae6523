"""Memory regions, and the sizes of a trn2 core."""

from __future__ import annotations

from enum import Enum
from typing import Final

NUM_PARTITIONS: Final = 128
SBUF_PARTITION_BYTES: Final = 224 * 1024
"""Physical SBUF per partition (trn2 architecture guide)."""
SBUF_USABLE_BYTES: Final = 208 * 1024
"""What AWS's own allocators use; unaddressed tiles get no more."""
PSUM_PARTITION_BYTES: Final = 16 * 1024
PSUM_BANK_BYTES: Final = 2048
PSUM_NUM_BANKS: Final = 8


class MemoryRegion(Enum):
    """Where a tensor lives."""

    # the plan caches hash members on every instruction; Enum's own hash is a Python function
    __hash__ = object.__hash__

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"


SBUF, PSUM = MemoryRegion.sbuf, MemoryRegion.psum
PRIVATE_HBM, SHARED_HBM = MemoryRegion.private_hbm, MemoryRegion.shared_hbm
ON_CHIP: Final = frozenset({SBUF, PSUM})
HBM: Final = frozenset({PRIVATE_HBM, SHARED_HBM})
