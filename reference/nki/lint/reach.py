"""Checks a kernel that is about to run, with all that it can call."""

import ast
import inspect
import linecache
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache, partial
from threading import RLock
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..nkiobject import NKIObject
from . import signatures
from .bindings import FUNCTION_TYPES, Function
from .finding import Finding, Kind
from .loops import Loops
from .module import Module
from .project import Project
from .rules import BEFORE_RUN
from .scope import File, Scope

_PACKAGE = __package__.rpartition(".")[0]
_STDLIB = sysconfig.get_path("stdlib")
_LIBRARIES = ("numpy", "ml_dtypes", "torch", "jax", "jaxlib", "builtins", "typing")
_LONG = 1000  # elements of a container that are looked at
_PLAIN = (int, float, str, bytes, bool, complex, type(None), Enum)


def check_kernel(
    kernel: Callable[..., Any], arguments: Mapping[str, object] | None = None
) -> tuple[Finding, ...]:
    """Return the level 1 findings in a kernel and in all that it can call.

    That is what it reaches by name (globals, modules, closures, containers, functools.partial),
    and what its arguments hold: functions, and the methods of objects. Functions of other files
    are followed, except those of the interpreter and of Python. A function whose source is not to
    be had gives no findings. Names that the API does not have are left to the run, which sees
    whether they are reached.
    """
    followed = {
        name: value for name, value in (arguments or {}).items() if _may_hold_functions(value)
    }
    report = None if followed else _reports.get(kernel)
    if report is None or not report.is_current():
        reach = _Reach()
        with _lock:
            reach.visit(kernel)
            for value in followed.values():
                reach.visit(value)
        for name, value in followed.items():
            reach.found.update(_check_argument(kernel, name, value))
        order = sorted(reach.found, key=lambda item: (item.path, item.line, item.column, item.rule))
        report = _Report(tuple(order), reach.looked_up)
        if not followed:
            _reports[kernel] = report
    return report.findings


def _may_hold_functions(value: object) -> bool:
    """Whether an argument is worth following: no number, no string, no array."""
    if isinstance(value, _PLAIN):
        return False
    known = isinstance(value, list | tuple | dict | set | frozenset) or callable(value)
    return known or _is_followed(type(value))


class _Report(NamedTuple):
    """The findings of a kernel, and what the names meant when it was checked."""

    findings: tuple[Finding, ...]
    looked_up: list[tuple[Mapping[str, object], str, object]]

    def is_current(self) -> bool:
        """Whether all names still mean the same."""
        return all(names.get(name) is value for names, name, value in self.looked_up)


_reports: WeakKeyDictionary[Callable[..., Any], _Report] = WeakKeyDictionary()
_lock = RLock()  # threads that launch at the same time share what is known of files


class _Names(NamedTuple):
    """What the code of a function mentions."""

    globals: tuple[str, ...]  # dotted names of the module, and names of enclosing functions
    attributes: frozenset[str]  # the last parts of attributes, which may be methods


class _Reach:
    """The functions that a kernel can call, found by following values."""

    def __init__(self) -> None:
        self.found: set[Finding] = set()
        self.looked_up: list[tuple[Mapping[str, object], str, object]] = []
        self._seen: dict[int, object] = {}  # keeps what it has seen alive, so that ids stay theirs
        self._mentioned: set[str] = set()
        self._methods: dict[str, list[object]] = {}

    def visit(self, root: object) -> None:
        """Follow a value."""
        queue = [root]
        while queue:
            value = queue.pop()
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            queue += self._parts(value)

    def _parts(self, value: object) -> Iterable[object]:
        """Return what calling, indexing or reading a value can lead to."""
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return value.__func__, value.__self__
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
        if _is_followed(type(value)) and not isinstance(value, ModuleType):
            return type(value), *getattr(value, "__dict__", {}).values()
        return ()

    def _class(self, cls: type) -> Iterator[object]:
        """Yield the methods that run by themselves or that some code mentions."""
        for name, value in vars(cls).items():
            if name.startswith("__") or name in self._mentioned:
                yield value
            else:
                self._methods.setdefault(name, []).append(value)
        yield from cls.__bases__

    def _function(self, function: FunctionType) -> Iterator[object]:
        if "__wrapped__" in function.__dict__:
            yield inspect.unwrap(function)
            return
        if _is_own(function):
            return
        findings, names = _check_function(function)
        self.found.update(findings)
        for name in names.attributes - self._mentioned:
            self._mentioned.add(name)
            yield from self._methods.pop(name, ())
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name in names.globals:
            yield from self._look_up(function, cells, name)
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()

    def _look_up(
        self, function: FunctionType, cells: Mapping[str, Any], name: str
    ) -> Iterator[object]:
        """Yield what a dotted name means to a function, as far as modules go."""
        head, *rest = name.split(".")
        if head in cells:
            try:
                value = cells[head].cell_contents
            except ValueError:  # not assigned yet
                return
        else:
            value = self._read(function.__globals__, head)
        for part in rest:
            if not isinstance(value, ModuleType):
                break
            value = self._read(vars(value), part)
        if not isinstance(value, ModuleType):
            yield value

    def _read(self, names: Mapping[str, object], name: str) -> object:
        value = names.get(name)
        self.looked_up.append((names, name, value))
        return value


def _is_own(value: FunctionType | type) -> bool:
    """Whether something belongs to the interpreter or to Python itself."""
    if (value.__module__ or "").startswith(_PACKAGE + "."):
        return True
    if not isinstance(value, FunctionType):
        return False
    path = value.__code__.co_filename
    return path.startswith(_STDLIB) and "-packages" not in path


def _is_followed(cls: type) -> bool:
    """Whether a class is the user's: not the interpreter's, Python's or an array library's."""
    root = (cls.__module__ or "").partition(".")[0]
    return not _is_own(cls) and root not in _LIBRARIES and root not in sys.stdlib_module_names


def _check_argument(kernel: Callable[..., Any], name: str, value: object) -> Iterator[Finding]:
    """Yield what NKI refuses about the value of an argument, at the kernel's first line."""
    cls = type(value)
    if isinstance(value, list):
        rule, what, use = "list-argument", "a list", "a tuple"
    elif _is_followed(cls) and not isinstance(value, NKIObject | tuple | type):
        if callable(value) and "__wrapped__" in getattr(value, "__dict__", ()):
            return
        rule = "class-base"
        what = f"a {cls.__name__}, whose class is not an NKIObject"
        use = f"class {cls.__name__}(NKIObject) and no other base"
    else:
        return
    code = getattr(inspect.unwrap(kernel), "__code__", None)
    if isinstance(code, CodeType):
        place = code.co_filename, code.co_firstlineno, 1
        yield Finding(*place, rule, Kind.REJECTED, f"argument {name} is {what}", use)


_checked: dict[tuple[str, CodeType], tuple[frozenset[Finding], _Names]] = {}
_project = Project()
_loops = Loops(_project)


def _check_function(function: FunctionType) -> tuple[frozenset[Finding], _Names]:
    """Return the findings of one function, and the names it mentions; by code, once."""
    code = function.__code__
    key = code.co_filename, code  # equal code may lie in two files
    if key not in _checked:
        linecache.checkcache(code.co_filename)
        source = "".join(linecache.getlines(code.co_filename))
        known = signatures.by_identity()
        runtime = [
            (name, known[id(value)])
            for name, value in function.__globals__.items()
            if id(value) in known
        ]
        functions = _parse(code.co_filename, source, tuple(runtime)) if source else {}
        file, node = functions.get(code.co_firstlineno, (None, None))
        if file is None or node is None or node.name != code.co_name:  # edited meanwhile
            return frozenset(), _Names(code.co_names + code.co_freevars, frozenset(code.co_names))
        scope = Scope(file, node)
        findings = frozenset(item for rule in BEFORE_RUN for item in rule(scope))
        _checked[key] = findings, _mentions(scope)
    return _checked[key]


@lru_cache(maxsize=256)
def _parse(
    path: str, source: str, runtime: tuple[tuple[str, str], ...]
) -> dict[int, tuple[File, Function]]:
    """Return the functions of a file by the line a code object starts at."""
    try:
        file = File(Module(path, source, dict(runtime)), _loops)
    except (SyntaxError, ValueError, RecursionError):
        return {}  # a file that has changed since it was imported
    _project.add(file.module)
    return {
        min([node.lineno, *(item.lineno for item in node.decorator_list)]): (file, node)
        for node in file.module.bindings.scope_of
        if isinstance(node, FUNCTION_TYPES)
    }


def _mentions(scope: Scope) -> _Names:
    """Return the names outside of a function that it mentions, without those of NKI."""
    module = scope.module
    inner = {scope.function, *(node for node in scope.nodes if isinstance(node, FUNCTION_TYPES))}
    names, attributes = set(), set()
    for node in scope.nodes:
        if isinstance(node, ast.Attribute):
            attributes.add(node.attr)
        if not isinstance(node, ast.Name | ast.Attribute) or module.nki_name(node):
            continue
        dotted = module.dotted(node)
        found = module.bindings.find(dotted.partition(".")[0], module.scope_of(node))
        if dotted and (found is None or found[0] not in inner):
            names.add(dotted)
    return _Names(tuple(sorted(names)), frozenset(attributes))
