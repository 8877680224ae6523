"""Running one instruction on arrays: what the instruction tests share."""

from collections.abc import Callable
from typing import Any

import numpy as np

from segattn.reference import nki

nl, nisa = nki.language, nki.isa


def run(
    body: Callable[..., Any],
    *inputs: Any,
    out: tuple[tuple[int, ...], str] | None = None,
    psum: bool = False,
) -> Any:
    """Run `body(dst, *tiles)` in a kernel and return dst as an array.

    The inputs are loaded to SBUF; dst has the shape and dtype `out` (default: as the first input)
    in SBUF, or in PSUM and copied out.
    """

    @nki.jit
    def kernel(*arrays: Any) -> Any:
        tiles = [nl.load(a) for a in arrays]
        shape, dtype = out or (tiles[0].shape, tiles[0].dtype)
        dst = nl.ndarray(shape, dtype=dtype, buffer=nl.psum if psum else nl.sbuf)
        body(dst, *tiles)
        result = nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)
        if psum:
            evicted = nl.ndarray(shape, dtype=dtype)
            nisa.tensor_copy(evicted, dst)
            dst = evicted
        nisa.dma_copy(result, dst)
        return result

    return kernel(*inputs)


def floats(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    """Standard normal values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
