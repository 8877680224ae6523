"""The signatures of the NKI API, read from the interpreter's own modules."""

import importlib
import inspect
from functools import cache
from types import ModuleType

# Modules whose every public name is known; `nki` itself also holds framework glue.
COMPLETE = ("nki.isa", "nki.language", "nki.collectives")
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
    """Return the signature of an API function, None for anything else."""
    owner, _, attribute = name.rpartition(".")
    module = _module(owner) if owner in COMPLETE else None
    function = getattr(module, attribute, None)
    return inspect.signature(function) if inspect.isfunction(function) else None


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name.replace("nki.", "..", 1), __package__)
    except ModuleNotFoundError:
        return None
