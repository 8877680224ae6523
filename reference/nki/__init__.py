"""NumPy interpreter of the NKI 0.6.0 instruction set for trn2.

`from segattn.reference import nki`, then `nki.jit`, `nki.language as nl`, `nki.isa as nisa` as on
the device; `install()` registers it as the module `nki` for kernels that import that name.
"""

from . import collectives, isa, language
from .errors import NkiValidationError, NkiWarning
from .install import install
from .launch import Kernel, jit, simulate
from .lnc import schedule
from .ranks import run_ranks
from .strict import DEFAULT_LEVELS, Level, level, strict

__all__ = [
    "DEFAULT_LEVELS",
    "Kernel",
    "Level",
    "NkiValidationError",
    "NkiWarning",
    "collectives",
    "install",
    "isa",
    "jit",
    "language",
    "level",
    "run_ranks",
    "schedule",
    "simulate",
    "strict",
]
