"""What lies outside of a function: the containers, objects and variables that it can reach.

The lists, dicts, sets, classes and objects of the modules and of the functions around it that its
code names are noted, with the names that it could bind, to be compared or put back later. An
attribute that an object had not before may be a value it keeps (functools.cached_property). Nothing
is read from source files.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import unwrap
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

_PACKAGE: Final = __name__.rpartition(".")[0]
_STDLIB: Final = sysconfig.get_path("stdlib")
_LIBRARIES: Final = frozenset(
    {"numpy", "ml_dtypes", "torch", "jax", "jaxlib", "pytest", "_pytest", "pluggy"}
)
_PLAIN: Final = (int, float, str, bytes, bool, complex, type(None))
_LONG: Final = 1000  # elements of a container that are compared one by one
_EMPTY: Final = object()

Place = tuple[str, int]


@dataclass
class Outside:
    """What the code of one kernel can reach outside of itself, as it was when it was noted."""

    containers: list[tuple[str, Place, Any, Any]] = field(default_factory=list)
    """Name, the line that names it, the container, and what it held."""
    names: list[tuple[str, Place, Mapping[str, Any], Any]] = field(default_factory=list)
    cells: list[tuple[str, Place, CellType, Any]] = field(default_factory=list)

    def changes(self) -> Iterator[tuple[str, Place, str]]:
        """Yield what is different now: name, the line that names it, and what happened."""
        for name, place, container, held in self.containers:
            if not _same(container, held):
                if isinstance(container, list | dict | set):
                    yield name, place, f"{name}, a {type(container).__name__} outside of it"
                else:
                    yield name, place, f"an attribute of {name}, which is outside of it"
        for name, place, names, value in self.names:
            if names.get(name, _EMPTY) is not value:
                yield name, place, f"the global {name}"
        for name, place, cell, value in self.cells:
            if _content(cell) is not value:
                yield name, place, f"{name} of the function around it"

    def restore(self) -> None:
        """Put containers, objects and variables of functions back to what was noted."""
        for _, _, container, held in self.containers:
            if not _same(container, held):
                _restore(container, held)
        for _, _, cell, value in self.cells:
            if value is not _EMPTY:
                cell.cell_contents = value


def noted(*functions: Callable[..., Any]) -> Outside:
    """What lies outside of functions now."""
    walk = _Walk()
    walk.visit(*functions)
    return walk.found


class _Walk:
    """Follows values from a kernel to the functions it can call and the containers they name."""

    def __init__(self) -> None:
        self.found = Outside()
        self._seen: dict[int, object] = {}  # keeps what was seen alive, so that ids stay theirs
        self._held: dict[int, object] = {}
        self._mentioned: set[str] = set()
        self._methods: dict[str, list[object]] = {}

    def visit(self, *roots: object) -> None:
        """Follow values."""
        queue = list(roots)
        while queue:
            value = queue.pop()
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            queue += self._parts(value)

    def _parts(self, value: object) -> Iterable[object]:
        """Return what calling, indexing or reading a value can lead to."""
        if isinstance(value, FunctionType):
            return self._function(unwrap(value))
        if isinstance(value, MethodType):
            return self._method(value)
        if isinstance(value, partial):
            return value.func, *value.args, *value.keywords.values()
        if isinstance(value, list | tuple | set | frozenset):
            return list(value)[:_LONG]
        if isinstance(value, dict):
            return list(value.values())[:_LONG]
        if isinstance(value, staticmethod | classmethod):
            return (value.__func__,)
        if isinstance(value, property):
            return (value.fget,)
        if isinstance(value, type):
            return self._class(value) if _is_followed(value) else ()
        wrapped = getattr(value, "__wrapped__", None) if callable(value) else None
        if wrapped is not None:
            return (wrapped,)
        return (type(value),) if _is_followed(type(value)) else ()

    def _class(self, cls: type) -> Iterator[object]:
        """Yield the methods that run by themselves or that some code mentions."""
        for name, value in vars(cls).items():
            if name.startswith("__") or name in self._mentioned:
                yield value
            else:
                self._methods.setdefault(name, []).append(value)
        yield from cls.__bases__

    def _method(self, method: MethodType) -> Iterator[object]:
        yield method.__func__
        code = getattr(unwrap(method.__func__), "__code__", None)
        place = ("", 0) if code is None else (code.co_filename, code.co_firstlineno)
        yield from self._named("self", place, method.__self__)

    def _function(self, function: Any) -> Iterator[object]:
        if not isinstance(function, FunctionType):
            yield function
            return
        code = function.__code__
        if _is_foreign(function):
            return
        inner = list(_codes(code))
        mentioned = {name for part in inner for name in part.co_names}
        for name in mentioned - self._mentioned:
            self._mentioned.add(name)
            yield from self._methods.pop(name, ())
        place = code.co_filename, code.co_firstlineno
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            value = _content(cell)
            if not _is_inner(name, code):
                self.found.cells.append((name, place, cell, value))
                yield from self._named(name, place, value)
        for name in mentioned:
            value = function.__globals__.get(name, _EMPTY)
            if value is not _EMPTY:
                self.found.names.append((name, place, function.__globals__, value))
            if isinstance(value, ModuleType):
                yield from self._module(value, mentioned, place)
            else:
                yield from self._named(name, place, value)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield from self._named(f"a default of {code.co_name}", place, value)

    def _named(self, name: str, place: Place, value: object) -> Iterator[object]:
        """Note a container, object or class under its name, with what is in it."""
        yield value
        if isinstance(value, _PLAIN) or id(value) in self._held:
            return
        self._held[id(value)] = value
        if isinstance(value, list | dict | set):
            self.found.containers.append((name, place, value, _held(value)))
            inner = self._parts(value)
        elif attributes := _attributes(value):
            self.found.containers.append((name, place, value, attributes))
            inner = attributes.values()
        else:
            return
        for part in list(inner):
            yield from self._named(name, place, part)

    def _module(self, module: ModuleType, mentioned: set[str], place: Place) -> Iterator[object]:
        """Yield what the code may read from a module: its attributes that the code names."""
        root = module.__name__.partition(".")[0]
        if root in _LIBRARIES or root in sys.stdlib_module_names or _is_own(module.__name__):
            return
        for name in mentioned & vars(module).keys():
            value = vars(module)[name]
            if not isinstance(value, ModuleType):
                self.found.names.append((name, place, vars(module), value))
                yield from self._named(name, place, value)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of the functions and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_inner(name: str, code: CodeType) -> bool:
    """Whether a free variable is the function's own name or class, which binding fills later."""
    return name in ("__class__", code.co_name)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _EMPTY


def _held(container: Any) -> Any:
    if len(container) > _LONG:
        return len(container)
    return container.copy()


def _attributes(value: object) -> dict[str, object]:
    """What a class of the user, or an object of one, holds: methods, which code names, excepted."""
    if not _is_followed(value if isinstance(value, type) else type(value)):
        return {}
    found = dict(getattr(value, "__dict__", {}))
    for cls in () if isinstance(value, type) else type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found[name] = getattr(value, name)
    return {n: v for n, v in found.items() if not (n.startswith("__") or callable(v))}


def _restore(container: Any, held: Any) -> None:
    if isinstance(held, int):
        if isinstance(container, list):
            del container[held:]
    elif isinstance(container, list):
        container[:] = held
    elif isinstance(container, dict | set):
        container.clear()
        container.update(held)
    else:
        put = type.__setattr__ if isinstance(container, type) else object.__setattr__
        for name, value in held.items():
            put(container, name, value)


def _same(container: Any, held: Any) -> bool:
    """Whether a container holds the very objects it held."""
    if isinstance(held, int):
        return len(container) == held
    if not isinstance(container, list | dict | set):
        now = _attributes(container)
        return all(now.get(name, _EMPTY) is value for name, value in held.items())
    if len(container) != len(held):
        return False
    if isinstance(container, dict):
        return all(container.get(key, _EMPTY) is value for key, value in held.items())
    if isinstance(container, set):
        return bool(container == held)
    return all(now is before for now, before in zip(container, held, strict=True))


def _is_own(name: str) -> bool:
    return name == _PACKAGE or name.startswith(_PACKAGE + ".")


def _is_foreign(function: FunctionType) -> bool:
    """Whether a function belongs to the interpreter, to Python or to an array library."""
    path = function.__code__.co_filename
    module = function.__module__ or ""
    stdlib = path.startswith(_STDLIB) and "-packages" not in path
    return stdlib or _is_own(module) or module.partition(".")[0] in _LIBRARIES


def _is_followed(cls: type) -> bool:
    """Whether a class is the user's: not the interpreter's, Python's or an array library's."""
    module = cls.__module__ or ""
    root = module.partition(".")[0]
    return not _is_own(module) and root not in _LIBRARIES and root not in sys.stdlib_module_names
