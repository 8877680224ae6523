"""A file, and one function of its kernel code, as the rules see them."""

import ast
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, TypeVar

from .bindings import Function
from .finding import Finding, Kind
from .loops import loop_bodies
from .module import Module
from .value import Value
from .values import Values

NodeT = TypeVar("NodeT", bound=ast.AST)


class File:
    """A module with what the rules of all its functions share."""

    def __init__(self, module: Module) -> None:
        self.module = module

    @cached_property
    def bodies(self) -> dict[Function, str]:
        """Return the functions that are bodies of dynamic loops, with the name of the loop."""
        return loop_bodies(self.module)

    @cached_property
    def values(self) -> Values:
        """Return the kinds of the file's values."""
        return Values(self.module, self.bodies)

    def report(
        self, kind: Kind, rule: str, node: ast.AST, message: str, replacement: str = ""
    ) -> Finding:
        """Return a finding at a node (at line 1 for nodes without a place)."""
        line = getattr(node, "lineno", 1)
        column = getattr(node, "col_offset", 0) + 1
        return Finding(self.module.path, line, column, rule, kind, message, replacement)


class Scope:
    """A function with the nodes that run in it and shorthands for what rules ask."""

    def __init__(self, file: File, function: Function) -> None:
        self.file = file
        self.module = file.module
        self.function = function
        self.is_kernel = function in file.module.kernels

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Everything that runs: body and defaults, outer statements first."""
        return tuple(self.module.code_nodes(self.function))

    def of(self, kind: type[NodeT]) -> Iterator[NodeT]:
        """Yield the nodes of exactly one type."""
        yield from self._by_type.get(kind, ())

    @cached_property
    def _by_type(self) -> dict[type, list[Any]]:
        found: dict[type, list[Any]] = {}
        for node in self.nodes:
            found.setdefault(type(node), []).append(node)
        return found

    @cached_property
    def calls(self) -> tuple[tuple[str, ast.Call], ...]:
        """Return all calls of NKI functions with their full names."""
        named = ((self.module.called(node), node) for node in self.of(ast.Call))
        return tuple((name, node) for name, node in named if name)

    @cached_property
    def bodies(self) -> dict[Function, str]:
        """Return the function itself and its local functions that run as bodies of a loop."""
        bodies = self.file.bodies
        own = {self.function: bodies[self.function]} if self.function in bodies else {}
        return own | {node: bodies[node] for node in self.of(ast.FunctionDef) if node in bodies}

    def value(self, node: ast.AST) -> Value:
        """Return the kind of an expression's value."""
        return self.file.values.of(node)

    def is_builtin(self, name: str, node: ast.AST) -> bool:
        """Whether a name means Python's builtin where a node stands."""
        return self.module.bindings.find(name, self.module.scope_of(node)) is None

    def parent(self, node: ast.AST) -> ast.AST:
        """Return the node that holds `node`."""
        return self.module.parents[node]

    def report(
        self, kind: Kind, rule: str, node: ast.AST, message: str, replacement: str = ""
    ) -> Finding:
        """Return a finding at a node (at the function itself for nodes without a place)."""
        place = node if hasattr(node, "lineno") else self.function
        return self.file.report(kind, rule, place, message, replacement)


Rule = Callable[[Scope], Iterator[Finding]]
FileRule = Callable[[File], Iterator[Finding]]


def literal_int(node: ast.AST | None) -> int | None:
    """Return the value of an integer literal, with or without a minus sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = literal_int(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return None


def is_none(node: ast.AST | None) -> bool:
    """Whether a node is the literal None."""
    return isinstance(node, ast.Constant) and node.value is None
