"""Level 2: classes as the open KLR front end takes them."""

import ast
from collections.abc import Iterator

from .bindings import FUNCTION_TYPES
from .finding import Finding
from .nki_names import dotted
from .scope import Rule, Scope

# Dunder methods that nothing calls.
_IGNORED = (
    *("__len__", "__iter__", "__next__", "__contains__", "__bool__", "__neg__", "__pos__"),
    *("__invert__", "__abs__", "__enter__", "__exit__", "__getattr__", "__setattr__", "__del__"),
)
_OTHER_ENUMS = ("IntEnum", "StrEnum", "Flag", "IntFlag", "ReprEnum")


def used_classes(scope: Scope) -> Iterator[Finding]:
    """Classes that kernel code names: their bodies, kinds of enumeration, calls."""
    reported: set[str] = set()
    for node in scope.of(ast.Name):
        cls = scope.module.class_of(node)
        if cls is None or cls.name in reported:
            continue
        reported.add(cls.name)
        yield from _enumeration(scope, node, cls)
        yield from _body(scope, node, cls)
    for call in scope.of(ast.Call):
        if scope.value(call.func).kind == "class" and scope.value(call).kind == "enum":
            message = f"{ast.unparse(call)} makes a new object and finds no member"
            yield scope.warn("enum-call", call, message, "a member by name, or if and ==")


def _enumeration(scope: Scope, node: ast.AST, cls: ast.ClassDef) -> Iterator[Finding]:
    for base in cls.bases:
        name = dotted(base).split(".")[-1]
        if name in _OTHER_ENUMS:
            message = f"class {cls.name}({name}) is rejected"
            yield scope.warn("enum-class", node, message, f"class {cls.name}(Enum)")


def _body(scope: Scope, node: ast.AST, cls: ast.ClassDef) -> Iterator[Finding]:
    use = "assignments of one name each, and methods"
    for keyword in cls.keywords:
        message = f"class {cls.name}: keyword {keyword.arg} is rejected"
        yield scope.warn("class-body", node, message, "no keywords")
    for statement in cls.body:
        value = getattr(statement, "value", None)
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        plain = len(targets) == 1 and isinstance(targets[0], ast.Name)
        if isinstance(statement, ast.Pass | ast.FunctionDef):
            continue
        if isinstance(statement, ast.Expr):
            plain = isinstance(value, ast.Constant)
        elif not isinstance(statement, ast.Assign | ast.AnnAssign):
            plain = False
        if not plain:
            what = ast.unparse(statement).split("\n")[0]
            message = f"class {cls.name}: `{what}` in a class body is rejected"
            yield scope.warn("class-body", node, message, use)
        elif isinstance(value, ast.Call) and _has_factory(value):
            message = f"default_factory in class {cls.name} gives None"
            yield scope.warn("default-factory", node, message, "a value set in __post_init__")
        elif isinstance(targets[0], ast.Name) and targets[0].id == "__slots__":
            message = f"class {cls.name}: what slots hold arrives as None"
            yield scope.warn("class-body", node, message, "no __slots__")


def _has_factory(value: ast.Call) -> bool:
    return any(item.arg == "default_factory" for item in value.keywords)


def methods(scope: Scope) -> Iterator[Finding]:
    """Methods that nothing calls, or that are called with other arguments."""
    function = scope.function
    cls = scope.module.scope_of(function)
    if not isinstance(cls, ast.ClassDef):
        return
    if function.name in _IGNORED or _in_place(function.name):
        message = f"{function.name} is never called"
        yield scope.warn("dunder", function, message, "a method with a name, called by it")
    elif function.name == "__getitem__":
        message = "__getitem__ always gets a tuple"
        yield scope.warn("dunder", function, message, "a method with a name, called by it")
    static = {
        item.name
        for item in cls.body
        if isinstance(item, FUNCTION_TYPES)
        and any(dotted(mark) == "staticmethod" for mark in item.decorator_list)
    }
    for call in scope.of(ast.Call):
        owner, _, name = dotted(call.func).rpartition(".")
        if owner == "self" and name in static:
            message = f"static method {name} gets self when called through it"
            yield scope.warn("staticmethod", call, message, f"{cls.name}.{name}(...)")


def _in_place(name: str) -> bool:
    return name.startswith("__i") and name.endswith("__") and name not in ("__init__", "__int__")


RULES: tuple[Rule, ...] = (used_classes, methods)
