"""Level 1: the classes that kernel code uses inherit NKIObject or Enum, and nothing else."""

import ast
from collections.abc import Iterator

from .finding import Finding, Kind
from .nki_names import dotted
from .scope import Rule, Scope
from .value import ENUM_BASES

# Bases of classes that describe types and have no objects of their own.
_DESCRIPTIONS = ("Protocol", "TypedDict", "NamedTuple")


def used_classes(scope: Scope) -> Iterator[Finding]:
    """A class that kernel code names, or whose object it reads from the module."""
    reported: set[str] = set()
    for node in scope.of(ast.Name):
        cls = scope.module.class_of(node)
        value = scope.value(node)
        if cls is None and value.kind == "object" and isinstance(node.ctx, ast.Load):
            found = scope.module.bindings.find(node.id, scope.module.scope_of(node))
            if found is not None and found[0] is scope.module.tree:
                cls = scope.module.classes[value.detail]
        if cls is not None and cls.name not in reported:
            reported.add(cls.name)
            yield from _check(scope, node, cls)


def annotations(scope: Scope) -> Iterator[Finding]:
    """A class that annotates a kernel's parameter, for an object that is an argument."""
    args = scope.function.args
    for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs] if scope.is_kernel else ():
        for node in ast.walk(arg.annotation) if arg.annotation is not None else ():
            cls = scope.module.class_of(node)
            if cls is not None and not set(_bases(cls)) & set(_DESCRIPTIONS):
                yield from _check(scope, node, cls)


def _bases(cls: ast.ClassDef) -> list[str]:
    return [dotted(base).split(".")[-1] for base in cls.bases]


def _check(scope: Scope, node: ast.AST, cls: ast.ClassDef) -> Iterator[Finding]:
    bases = _bases(cls)
    if len(bases) != 1 or (bases[0] != "NKIObject" and bases[0] not in ENUM_BASES):
        message = f"class {cls.name} in kernel code has bases ({', '.join(bases)})"
        use = f"class {cls.name}(NKIObject) and no other base"
        yield scope.report(Kind.REJECTED, "class-base", node, message, use)


RULES: tuple[Rule, ...] = (used_classes, annotations)
