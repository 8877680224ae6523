"""One matmul on the interpreter, and what it should give."""

from typing import Any

import numpy as np

from segattn.reference import nki
from segattn.tests.nki.running import run

nl, nisa = nki.language, nki.isa


def product(a: Any, b: Any) -> Any:
    return a.astype(np.float64).T @ b.astype(np.float64)


def matmul(a: Any, b: Any, **options: Any) -> Any:
    """The result of one nc_matmul on a fresh PSUM tile."""
    shape = options.pop("shape", (a.shape[-1], b.shape[-1]))
    dtype = options.pop("dtype", nl.float32)
    return run(
        lambda dst, s, m: nisa.nc_matmul(dst, s, m, **options),
        a,
        b,
        out=(shape, dtype),
        psum=True,
    )
