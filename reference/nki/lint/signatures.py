"""The signatures of the NKI API, read from the interpreter's own modules."""

import importlib
import inspect
from functools import cache
from types import ModuleType

# Modules whose every public name is known; `nki` itself also holds framework glue.
COMPLETE = ("nki.isa", "nki.language", "nki.collectives", "nki.compiler")
_SUBMODULES = {"nki.isa.constants"}


@cache
def exists(name: str) -> bool:
    """Whether `nki.isa.NAME` (or language, collectives) is part of the API."""
    owner, _, attribute = name.rpartition(".")
    if name in _SUBMODULES or owner not in COMPLETE:
        return True
    module = _module(owner)
    return module is None or hasattr(module, attribute)


@cache
def names(owner: str) -> tuple[str, ...]:
    """Return the public names of a module."""
    module = _module(owner)
    return tuple(name for name in vars(module or {}) if not name.startswith("_"))


@cache
def signature(name: str) -> inspect.Signature | None:
    """Return the signature of an API function, None for anything else.

    What exists on trn3 only has none: calling it is the error, whatever its arguments.
    """
    owner, _, attribute = name.rpartition(".")
    module = _module(owner) if owner in COMPLETE else None
    function = getattr(module, attribute, None)
    known = inspect.isfunction(function) or "__signature__" in getattr(function, "__dict__", ())
    if function is None or not known or function.__module__.endswith(".isa.trn3"):
        return None
    return inspect.signature(function)


@cache
def tensor_attributes() -> frozenset[str]:
    """Return the public attributes and methods of NkiTensor."""
    tensor = getattr(_module("nki.language"), "NkiTensor", None)
    return frozenset(name for name in dir(tensor) if not name.startswith("_"))


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"..{name.removeprefix('nki').lstrip('.')}", __package__)
    except ModuleNotFoundError:
        return None
