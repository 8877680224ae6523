"""Registers the interpreter under the module names that kernels import."""

from __future__ import annotations

import sys
import types

from . import isa, language
from .launch import jit, simulate


def namespace() -> types.ModuleType:
    """A module that stands for `nki`, with language, isa and the other sub-modules set."""
    nki = types.ModuleType("nki", "The segattn interpreter of NKI 0.6.0 for trn2.")
    nki.jit = jit  # type: ignore[attr-defined]  # a module is filled like this
    nki.simulate = simulate  # type: ignore[attr-defined]
    nki.language = language  # type: ignore[attr-defined]
    nki.isa = isa  # type: ignore[attr-defined]
    return nki


def install() -> None:
    """Make `import nki`, `nki.language` and `nki.isa` mean this interpreter.

    RuntimeError if another nki is loaded already.
    """
    loaded = sys.modules.get("nki")
    if loaded is not None and getattr(loaded, "language", None) is not language:
        raise RuntimeError(
            f"another nki is loaded already ({getattr(loaded, '__file__', loaded)}); "
            "call install() before importing it"
        )
    sys.modules["nki"] = namespace()
    sys.modules["nki.language"] = language
    sys.modules["nki.isa"] = isa
