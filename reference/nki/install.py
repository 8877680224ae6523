"""Registers the interpreter under the names that third-party kernels import.

`install()` makes `import nki` and `import neuronxcc.nki` mean this package; nothing is registered
before that.
"""

import importlib
import sys
from types import ModuleType

_SUBMODULES = (
    "language",
    "isa",
    "isa.constants",
    "collectives",
    "dtype",
    "typing",
    "compiler",
    "simulator",
)
_PACKAGE = __name__.rpartition(".")[0]
_registered: dict[str, ModuleType] = {}


def install() -> None:
    """Register `nki` with its submodules, and the alias `neuronxcc.nki`, in `sys.modules`.

    Calling it again does nothing. Raises RuntimeError if another `nki` is imported already:
    kernels that hold its functions would mix the two.
    """
    if _registered:
        return
    loaded = sys.modules.get("nki")
    if loaded is not None:
        where = getattr(loaded, "__file__", None) or "unknown place"
        raise RuntimeError(
            f"another nki is imported already ({where}): call install() before that import"
        )
    modules = {"nki": importlib.import_module(_PACKAGE)}
    for name in _SUBMODULES:
        modules[f"nki.{name}"] = importlib.import_module(f"{_PACKAGE}.{name}")
    modules |= {f"neuronxcc.{name}": module for name, module in modules.items()}
    if "neuronxcc" not in sys.modules:
        parent = ModuleType("neuronxcc", "Holds the alias of nki that install() registers.")
        parent.__path__ = []
        vars(parent)["nki"] = modules["nki"]
        modules["neuronxcc"] = parent
    _registered.update(modules)
    sys.modules.update(modules)


def uninstall() -> None:
    """Remove what `install()` registered."""
    for name, module in _registered.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _registered.clear()
