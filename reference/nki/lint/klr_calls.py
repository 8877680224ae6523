"""Level 2: calls of builtins, methods and libraries that the open KLR front end does not have."""

import ast
from collections.abc import Iterator

from .finding import Finding, Kind
from .scope import Rule, Scope, literal_int

_INDEX_LOOP = "for i in range(len(x)) with x[i]"
_MISSING = {
    "enumerate": _INDEX_LOOP,
    "zip": _INDEX_LOOP,
    "reversed": "list.reverse, or range with a negative step",
    "map": "a for loop",
    "filter": "a for loop",
    "set": "a list",
    "frozenset": "a tuple",
    "bytes": "a list of integers",
    "super": "a call of the function by name",
    "sum": "a for loop",
    "sorted": "data sorted before the kernel",
    "any": "a for loop",
    "all": "a for loop",
    "round": "int, or integer arithmetic",
    "pow": "**",
    "hasattr": "an explicit flag",
    "getattr": "attribute access by name",
    "setattr": "an assignment",
    "callable": "an explicit flag",
    "repr": "an f-string",
    "iter": "a for loop",
    "next": "an index",
    "ord": "integers",
    "chr": "integers",
}
_MATH = ("ceil", "floor", "gcd", "log2", "log10", "pow", "sqrt", "pi", "e", "inf", "nan")
_STRING_METHODS = (
    *("join", "format", "split", "startswith", "endswith", "upper", "lower", "strip", "replace"),
    *("removeprefix", "removesuffix", "encode", "ljust", "rjust", "zfill"),
)
_LIST_METHODS = {"sort": "data sorted before the kernel", "insert": "list addition"}
_KNOWN_MODULES = ("math", "nki", "numpy", "nl", "nisa")


def _warn(scope: Scope, rule: str, node: ast.AST, message: str, use: str = "") -> Finding:
    return scope.report(Kind.FRONT_END, rule, node, message, use)


def builtins(scope: Scope) -> Iterator[Finding]:
    """Builtin functions without a value, or with fewer arguments than in CPython."""
    for node in scope.of(ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in scope.module.functions or name in scope.parameters:
            continue
        if name in _MISSING:
            yield _warn(scope, "builtin", node, f"{name}() does not exist", _MISSING[name])
        elif name in ("min", "max") and (len(node.args) > 2 or node.keywords):
            message = f"{name} takes one list or two numbers"
            yield _warn(scope, "builtin", node, message, f"{name} of {name}, or a list")
        elif name == "list" and not node.args:
            yield _warn(scope, "builtin", node, "list() without an argument is rejected", "[]")
        elif name == "dict" and node.keywords:
            yield _warn(scope, "builtin", node, "dict(name=...) is rejected", "a dict display")
        elif name == "isinstance" and len(node.args) > 1 and isinstance(node.args[1], ast.Tuple):
            message = "isinstance with a tuple of types is always False"
            yield _warn(scope, "builtin", node, message, "one isinstance per type")
        elif name == "range":
            yield from _range(scope, node)


def _range(scope: Scope, node: ast.Call) -> Iterator[Finding]:
    parent = scope.parent(node)
    if not (isinstance(parent, ast.For | ast.comprehension) and parent.iter is node):
        message = "range has no value outside the header of a for loop"
        yield _warn(scope, "range", node, message, "a loop over range directly")
    elif node.keywords:
        yield _warn(scope, "range", node, "range with keywords is rejected", "positional arguments")


def methods(scope: Scope) -> Iterator[Finding]:
    """Methods that strings, lists and dicts do not have, or that ignore arguments."""
    for node in scope.of(ast.Call):
        if not isinstance(node.func, ast.Attribute) or scope.module.called(node):
            continue
        name = node.func.attr
        if name in _STRING_METHODS and not _is_module(scope, node.func.value):
            message = f"strings have no attributes such as {name}"
            yield _warn(scope, "string", node, message, "an f-string, or a value made before")
        elif name in _LIST_METHODS:
            message = f"list.{name} does not exist"
            yield _warn(scope, "list-method", node, message, _LIST_METHODS[name])
        elif name == "pop" and node.args and literal_int(node.args[0]) not in (None, -1):
            message = "list.pop ignores its argument and takes the last element"
            yield _warn(scope, "list-method", node, message, "an index and list slices")


def _is_module(scope: Scope, node: ast.expr) -> bool:
    head = scope.module.dotted(node).split(".")[0]
    return scope.module.imported(head, scope.module.scope_of(node)) is not None


def libraries(scope: Scope) -> Iterator[Finding]:
    """Modules whose functions kernel code cannot call."""
    for node in scope.of(ast.Attribute):
        if not isinstance(node.value, ast.Name):
            continue
        owner = node.value.id
        if owner == "math" and node.attr not in _MATH:
            message = f"math.{node.attr} does not exist"
            yield _warn(scope, "math", node, message, "a value computed before the kernel")
        elif owner in ("np", "numpy") and isinstance(scope.parent(node), ast.Call):
            if getattr(scope.parent(node), "func", None) is node:
                message = f"NumPy function {owner}.{node.attr} cannot be called"
                yield _warn(scope, "numpy", node, message, "an argument computed before the kernel")
        elif owner not in _KNOWN_MODULES and _is_plain_import(scope, node.value):
            message = f"{owner}.{node.attr} through `import {owner}` is not found"
            use = f"import {owner} as another name, or from a package import {owner}"
            yield _warn(scope, "plain-import", node, message, use)


def _is_plain_import(scope: Scope, node: ast.Name) -> bool:
    imported = scope.module.imported(node.id, scope.module.scope_of(node))
    return imported is not None and imported.plain


RULES: tuple[Rule, ...] = (builtins, methods, libraries)
