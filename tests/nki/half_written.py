"""A tile of which only a part was written."""

from typing import Any

import numpy as np

from segattn.reference import nki

nl, nisa = nki.language, nki.isa

X = np.arange(512, dtype=np.float32).reshape(32, 16)


def half_written(x: Any) -> Any:
    """A [32, 32] tile whose first 16 columns hold x [32, 16]."""
    tile = nl.ndarray((32, 32), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile[:, :16], src=x)
    return tile
