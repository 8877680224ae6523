"""Level 2: what kernel code may refer to outside of itself, by the open KLR front end."""

import ast
from collections.abc import Iterator

from .bindings import Imported
from .finding import Finding
from .nki_names import dotted
from .scope import Rule, Scope, constant_int
from .value import Value

_MATH = ("ceil", "floor", "gcd", "log2", "log10", "pow", "sqrt", "pi", "e", "inf", "nan")
_NUMPY_CONSTANTS = ("pi", "e", "inf", "nan", "newaxis", "euler_gamma")
_KNOWN_MODULES = ("math", "nki", "numpy", "nl", "nisa")
_CONSTANTS = ("arch", "sbuf", "psum", "hbm")
_AS_NONE = ("set", "bytes", "complex", "range", "slice")
_MAX_INT = 2**31 - 1


def libraries(scope: Scope) -> Iterator[Finding]:
    """Modules whose functions and dtypes kernel code cannot use."""
    for node in scope.of(ast.Attribute):
        if isinstance(node.value, ast.Name):
            imported = scope.module.imported(node.value.id, scope.module.scope_of(node))
            if imported is not None and not imported.name:
                yield from _use(scope, node, node.value.id, node.attr, imported)
    for name in scope.of(ast.Name):
        imported = scope.module.imported(name.id, scope.module.scope_of(name))
        if imported is not None and imported.name and imported.module in ("math", "numpy"):
            yield from _use(scope, name, imported.module, imported.name, imported)


def _use(
    scope: Scope, node: ast.expr, owner: str, name: str, imported: Imported
) -> Iterator[Finding]:
    full = node.id if isinstance(node, ast.Name) else f"{owner}.{name}"
    if imported.module == "math":
        if name not in _MATH:
            message = f"math.{name} does not exist"
            yield scope.warn("math", node, message, "a value computed before the kernel")
    elif imported.module == "numpy":
        if name in _NUMPY_CONSTANTS or _in_constant(scope, node):
            return
        parent = scope.parent(node)
        if isinstance(parent, ast.Call) and parent.func is node:
            message = f"NumPy function {full} cannot be called"
            yield scope.warn("numpy", node, message, "an argument computed before the kernel")
        elif not isinstance(parent, ast.Attribute):
            message = f"NumPy name {full} is not found"
            yield scope.warn("numpy", node, message, f"nl.{name}, or the dtype of a tensor")
    elif imported.plain and owner not in _KNOWN_MODULES:
        message = f"{full} through `import {owner}` is not found"
        use = f"import {owner} as another name, or from a package import {owner}"
        yield scope.warn("plain-import", node, message, use)


def _in_constant(scope: Scope, node: ast.AST) -> bool:
    """Whether a node belongs to the argument of nl.shared_constant, which takes NumPy arrays."""
    current = node
    while isinstance(parent := scope.parent(current), ast.expr | ast.keyword):
        if scope.module.called(parent) == "nki.language.shared_constant":
            return True
        current = parent
    return False


def module_values(scope: Scope) -> Iterator[Finding]:
    """Names of the module whose values do not arrive, or arrive as something else."""
    for node in scope.of(ast.Name):
        found = scope.module.bindings.find(node.id, scope.module.scope_of(node))
        if found is None or found[0] is not scope.module.tree:
            continue
        for value in found[1][-1:]:
            if isinstance(value, ast.expr) and not _in_constant(scope, node):
                yield from _module_value(scope, node, value)


def _module_value(scope: Scope, node: ast.Name, value: ast.expr) -> Iterator[Finding]:
    kind = scope.value(node)
    number = constant_int(value)
    function = dotted(value.func).split(".") if isinstance(value, ast.Call) else [""]
    if node.id in _CONSTANTS:
        message = f"{node.id} is predefined; the value of the file is ignored"
        yield scope.warn("predefined-name", node, message, "another name")
    elif kind.kind in _AS_NONE:
        message = f"{node.id} ({kind.kind}) arrives as None"
        yield scope.warn("module-value", node, message, "numbers, strings, tuples, lists or dicts")
    elif number is not None and not -_MAX_INT - 1 <= number <= _MAX_INT:
        message = f"{node.id} = {number} has more than 32 bits"
        yield scope.warn("module-value", node, message, "a signed 32-bit value")
    elif kind.kind == "dict" and _has_other_keys(scope, value):
        message = f"{node.id} has keys that are not strings"
        yield scope.warn("module-value", node, message, "string keys, or a list")
    elif kind == Value("numpy") and function[-1] != "float64":
        message = f"{node.id} = {ast.unparse(value.func)}(...) does not arrive"  # type: ignore[attr-defined]  # a call, as function tells
        use = "an argument of the kernel, or nl.shared_constant(array)"
        yield scope.warn("module-value", node, message, use)


def _has_other_keys(scope: Scope, value: ast.expr) -> bool:
    keys = value.keys if isinstance(value, ast.Dict) else []
    return any(key is not None and scope.value(key).kind not in ("", "str") for key in keys)


RULES: tuple[Rule, ...] = (libraries, module_values)
