"""NumPy interpreter of the NKI 0.7 instruction set for trn2.

`from segattn.reference import nki`, then `nki.jit`, `nki.language as nl`, `nki.isa as nisa` as on
the device; `install()` registers it as the module `nki` for kernels that import that name.
"""

from typing import TYPE_CHECKING

from . import collectives, compiler, isa, language, simulator
from .changes import missing_name
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
    "compiler",
    "install",
    "isa",
    "jit",
    "language",
    "level",
    "run_ranks",
    "schedule",
    "simulate",
    "simulator",
    "strict",
]

if not TYPE_CHECKING:  # a type checker would take any name for one that exists

    def __getattr__(name: str) -> object:
        """Names of earlier releases: AttributeError says what to write instead."""
        raise missing_name("nki", name, __all__)
