"""What the host code of a kernel file can no longer call."""

import ast
from collections.abc import Iterator

from .. import changes as tables
from .api_rules import jit_keywords
from .finding import Finding, Kind
from .scope import File, FileRule


def entry_points(file: File) -> Iterator[Finding]:
    """Ways to run, profile or embed a kernel that NKI no longer has; also as decorators."""
    for node in file.module.bindings.scope_of:
        if isinstance(node, ast.Attribute):
            name = file.module.nki_name(node)
            if name in tables.HOST:
                yield _entry_point(file, node, name)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                name = f"{node.module}.{alias.name}".removeprefix("neuronxcc.")
                if name in tables.HOST:
                    yield _entry_point(file, alias, name)


def _entry_point(file: File, node: ast.AST, name: str) -> Finding:
    change = tables.HOST[name]
    return file.report(
        Kind.REMOVED, "removed-api", node, f"{name}: {change.what}", change.replacement
    )


def jit_calls(file: File) -> Iterator[Finding]:
    """Options of nki.jit where it is called with the function."""
    decorators = {
        item
        for node in file.module.bindings.scope_of
        for item in getattr(node, "decorator_list", ())
    }
    for node in file.module.bindings.scope_of:
        call = node if isinstance(node, ast.Call) and node not in decorators else None
        if call is not None and file.module.wraps_as_kernel(call):
            yield from jit_keywords(file, call)


RULES: tuple[FileRule, ...] = (entry_points, jit_calls)
