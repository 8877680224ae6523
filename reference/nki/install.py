"""Registers the interpreter under the names that third-party kernels import.

`install()` makes `import nki` mean this package; nothing is registered before that. `neuronxcc.nki`
was another language: its modules import, so that files load that need a name of today from there,
and say so at their first use.
"""

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any, Final

from .errors import NkiWarning

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
OLD_LANGUAGE: Final = (
    "neuronxcc.nki is the language before NKI 0.2, which compilers since 0.4 refuse in kernels: "
    "import nki, and translate each construct by docs/old_language.md"
)
_PACKAGE = __name__.rpartition(".")[0]
_registered: dict[str, ModuleType] = {}


class _OldModule(ModuleType):
    """A module of `neuronxcc.nki`: the names that today's has, with one warning."""

    def __init__(self, name: str, today: ModuleType, told: list[bool]) -> None:
        super().__init__(name, OLD_LANGUAGE)
        self.__path__: list[str] = []
        self._today = today
        self._told = told
        """Shared by the modules: whether the warning was given."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and not self._told:
            self._told.append(True)
            warnings.warn(OLD_LANGUAGE, NkiWarning, stacklevel=2)
        try:
            return getattr(self._today, name)
        except AttributeError as error:
            raise AttributeError(f"{error}; {OLD_LANGUAGE}") from None


def install() -> None:
    """Register `nki` with its submodules, and those of `neuronxcc.nki`, in `sys.modules`.

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
    told: list[bool] = []
    old: dict[str, ModuleType] = {
        f"neuronxcc.{name}": _OldModule(f"neuronxcc.{name}", module, told)
        for name, module in modules.items()
    }
    old["neuronxcc.nki.typing"] = modules["nki.typing"]  # annotations, which are the same
    for name, module in old.items():
        parent, _, child = name.rpartition(".")
        if parent in old:
            vars(old[parent])[child] = module
    modules |= old
    if "neuronxcc" not in sys.modules:
        root = ModuleType("neuronxcc", OLD_LANGUAGE)
        root.__path__ = []
        vars(root)["nki"] = old["neuronxcc.nki"]
        modules["neuronxcc"] = root
    _registered.update(modules)
    sys.modules.update(modules)


def uninstall() -> None:
    """Remove what `install()` registered."""
    for name, module in _registered.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _registered.clear()
