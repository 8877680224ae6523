"""NumPy interpreter of the NKI 0.6.0 instruction set for trn2.

`from segattn.reference import nki`, then `nki.jit`, `nki.language as nl`, `nki.isa as nisa` as on
the device; `install()` registers it as the module `nki` for kernels that import that name.
"""

from . import collectives, isa, language
from .install import install
from .launch import Kernel, jit, simulate
from .lnc import schedule
from .ranks import run_ranks
from .strict import DEFAULT_LEVELS, strict

__all__ = [
    "DEFAULT_LEVELS",
    "Kernel",
    "collectives",
    "install",
    "isa",
    "jit",
    "language",
    "run_ranks",
    "schedule",
    "simulate",
    "strict",
]
