"""One function of kernel code, as the rules see it."""

import ast
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TypeVar

from .finding import Finding, Kind
from .module import Function, Module

NodeT = TypeVar("NodeT", bound=ast.AST)


class Scope:
    """A function with the nodes that run in it and shorthands for what rules ask."""

    def __init__(self, module: Module, function: Function) -> None:
        self.module = module
        self.function = function
        self.is_kernel = function in module.kernels

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Everything that runs: body and defaults, outer statements first."""
        return tuple(self.module.code_nodes(self.function))

    def of(self, kind: type[NodeT]) -> Iterator[NodeT]:
        """Yield the nodes of one type."""
        for node in self.nodes:
            if isinstance(node, kind):
                yield node

    @cached_property
    def calls(self) -> tuple[tuple[str, ast.Call], ...]:
        """Return all calls of NKI functions with their full names."""
        named = ((self.module.called(node), node) for node in self.of(ast.Call))
        return tuple((name, node) for name, node in named if name)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of all parameters."""
        args = self.function.args
        return tuple(arg.arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs])

    def parent(self, node: ast.AST) -> ast.AST:
        """Return the node that holds `node`."""
        return self.module.parents[node]

    def report(
        self, kind: Kind, rule: str, node: ast.AST, message: str, replacement: str = ""
    ) -> Finding:
        """Return a finding at a node (at the function itself for nodes without a place)."""
        line = getattr(node, "lineno", self.function.lineno)
        column = getattr(node, "col_offset", self.function.col_offset) + 1
        return Finding(self.module.path, line, column, rule, kind, message, replacement)


Rule = Callable[[Scope], Iterator[Finding]]


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
