"""Runs the rules: over a source file, and over a kernel that is about to run."""

import ast
import inspect
import linecache
import sysconfig
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from . import (
    api_rules,
    kernel_rules,
    klr_calls,
    klr_expressions,
    klr_statements,
    python_rules,
    register_rules,
)
from .finding import Finding, Kind
from .module import FUNCTION_TYPES, Function, Module
from .scope import Rule, Scope

_STDLIB = sysconfig.get_path("stdlib")
LEVEL_1: tuple[Rule, ...] = (
    *python_rules.RULES,
    *kernel_rules.RULES,
    *register_rules.RULES,
    *api_rules.RULES,
)
BEFORE_RUN: tuple[Rule, ...] = tuple(r for r in LEVEL_1 if r is not api_rules.unknown_names)
LEVEL_2: tuple[Rule, ...] = (
    *klr_statements.RULES,
    *klr_expressions.RULES,
    *klr_calls.RULES,
)


def lint_source(source: str, path: str = "<source>") -> list[Finding]:
    """Return all findings in the kernel code of a source text, in order of lines."""
    try:
        module = Module(path, source)
    except SyntaxError as error:
        message = f"not Python: {error.msg}"
        column = error.offset or 1
        return [Finding(path, error.lineno or 1, column, "syntax", Kind.SYNTAX, message)]
    found = set()
    for function in module.device_functions:
        found |= set(_apply(module, function, LEVEL_1 + LEVEL_2))
    return sorted(found, key=lambda item: (item.line, item.column, item.rule, item.message))


def lint_file(path: str | Path) -> list[Finding]:
    """Return all findings in the kernel code of a file."""
    return lint_source(Path(path).read_text(), str(path))


def check_kernel(kernel: Callable[..., Any]) -> tuple[Finding, ...]:
    """Return the level 1 findings in a kernel and in the functions it reaches by name.

    Functions of other files are followed, except those of the interpreter and of Python. A function
    whose source is not to be had gives no findings. Files are parsed once. Names that the API does
    not have are left to the run, which sees whether they are reached.
    """
    found: set[Finding] = set()
    seen: set[FunctionType] = set()
    queue: list[object] = [kernel]
    while queue:
        value = inspect.unwrap(queue.pop())  # type: ignore[arg-type]  # takes any object
        if isinstance(value, type) and not _is_own(value):
            # methods that the class itself defines: an Enum also holds those of enum.py
            queue += [
                item
                for item in vars(value).values()
                if isinstance(item, FunctionType) and item.__module__ == value.__module__
            ]
        if not isinstance(value, FunctionType) or value in seen or _is_own(value):
            continue
        seen.add(value)
        path = value.__code__.co_filename
        source = "".join(linecache.getlines(path))
        findings, names = _check_function(path, source, value.__code__.co_firstlineno)
        found.update(findings)
        queue += [item for name in names if (item := _look_up(value, name)) is not None]
    return tuple(sorted(found, key=lambda item: (item.path, item.line, item.column, item.rule)))


def _is_own(value: FunctionType | type) -> bool:
    """Whether something belongs to the interpreter or to Python itself."""
    if (value.__module__ or "").startswith(__package__.rpartition(".")[0] + "."):
        return True
    if not isinstance(value, FunctionType):
        return False
    path = value.__code__.co_filename
    return path.startswith(_STDLIB) and "-packages" not in path


def _look_up(function: FunctionType, name: str) -> object:
    """Return the function or class that a name, or module.name, means to a function."""
    head, _, rest = name.partition(".")
    value = function.__globals__.get(head)
    if rest:
        value = getattr(value, rest, None) if isinstance(value, ModuleType) else None
    return value if callable(value) else None


@lru_cache(maxsize=256)
def _parse(path: str, source: str) -> dict[int, tuple[Module, Function]]:
    """Return the functions of a file by the line a code object starts at."""
    module = Module(path, source)
    return {
        min([node.lineno, *(item.lineno for item in node.decorator_list)]): (module, node)
        for node in ast.walk(module.tree)
        if isinstance(node, FUNCTION_TYPES)
    }


@lru_cache(maxsize=4096)
def _check_function(
    path: str, source: str, line: int
) -> tuple[frozenset[Finding], tuple[str, ...]]:
    """Return the findings of one function, and the names it mentions."""
    module, function = _parse(path, source).get(line, (None, None)) if source else (None, None)
    if module is None or function is None:
        return frozenset(), ()
    names = set()
    for node in module.code_nodes(function):
        if isinstance(node, ast.Name | ast.Attribute) and not module.nki_name(node):
            names.add(module.dotted(node))
    findings = frozenset(_apply(module, function, BEFORE_RUN))
    return findings, tuple(sorted(names - {""}))


def _apply(module: Module, function: Function, rules: tuple[Rule, ...]) -> Iterator[Finding]:
    scope = Scope(module, function)
    for rule in rules:
        yield from rule(scope)
