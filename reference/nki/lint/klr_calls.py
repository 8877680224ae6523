"""Level 2: builtins and methods that the open KLR front end does not have."""

import ast
import builtins
from collections.abc import Iterator

from .finding import Finding
from .scope import Rule, Scope, literal_int

_INDEX_LOOP = "for i in range(len(x)) with x[i]"
_AVAILABLE = (
    *("len", "min", "max", "abs", "int", "float", "str", "bool", "divmod", "type", "slice"),
    *("print", "list", "tuple", "dict", "isinstance", "range"),
)
_REPLACEMENTS = {
    "enumerate": _INDEX_LOOP,
    "zip": _INDEX_LOOP,
    "reversed": "list.reverse, or range with a negative step",
    "set": "a list",
    "frozenset": "a tuple",
    "bytes": "a list of integers",
    "super": "a call of the function by name",
    "sorted": "data sorted before the kernel",
    "round": "int, or integer arithmetic",
    "pow": "**",
    "hasattr": "an explicit flag",
    "getattr": "attribute access by name",
    "setattr": "an assignment",
    "callable": "an explicit flag",
    "repr": "an f-string",
    "next": "an index",
    "breakpoint": "print, or nl.device_print",
}
# Methods that only strings have, known without knowing the object.
_STRING_METHODS = (
    *("join", "format", "split", "startswith", "endswith", "upper", "lower", "strip", "replace"),
    *("removeprefix", "removesuffix", "encode", "ljust", "rjust", "zfill"),
)
_METHODS = {
    "list": (*("append", "clear", "copy", "count", "extend", "index", "pop", "remove", "reverse"),),
    "dict": ("clear", "copy", "get", "items", "keys", "pop", "setdefault", "values"),
    "tuple": (),
    "int": (),
    "float": (),
    "bool": (),
    "none": (),
}
_METHOD_REPLACEMENTS = {
    "sort": "data sorted before the kernel",
    "insert": "list addition",
    "update": "d[key] = value per key",
}
_NEWER_ATTRIBUTES = ("dtype", "shape", "address", "offset", "pattern", "reshape", "ap", "buffer")
_TENSOR_ATTRIBUTES = (*_NEWER_ATTRIBUTES, "view", "name", "address_name")


def missing_builtins(scope: Scope) -> Iterator[Finding]:
    """Builtin functions without a value."""
    for node in scope.of(ast.Name):
        known = not isinstance(node.ctx, ast.Load) or node.id in _AVAILABLE
        if known or not hasattr(builtins, node.id) or not scope.is_builtin(node.id, node):
            continue
        meaning = getattr(builtins, node.id)
        if isinstance(meaning, type) and issubclass(meaning, BaseException):
            continue  # what raises or catches it is reported at level 1
        called = isinstance(scope.parent(node), ast.Call)
        message = f"{node.id}{'()' if called else ''} does not exist"
        use = _REPLACEMENTS.get(node.id, "a for loop, or a value computed before the kernel")
        yield scope.warn("builtin", node, message, use)


def builtin_calls(scope: Scope) -> Iterator[Finding]:
    """Builtin functions that take fewer arguments or kinds than in CPython."""
    for node in scope.of(ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in _AVAILABLE or not scope.is_builtin(name, node):
            continue
        kinds = [scope.value(argument).kind for argument in node.args]
        first = kinds[0] if kinds else ""
        if name == "len" and first in ("str", "tensor", "object"):
            use = "t.shape[0]" if first == "tensor" else "a number kept beside it"
            yield scope.warn("builtin", node, f"len of a {first} is rejected", use)
        elif name in ("min", "max") and (len(node.args) > 2 or node.keywords):
            message = f"{name} takes one list or two numbers"
            yield scope.warn("builtin", node, message, f"{name} of {name}, or a list")
        elif name in ("min", "max") and "bool" in kinds:
            yield scope.warn("builtin", node, f"{name} of a bool is rejected", "int(...) first")
        elif name in ("list", "tuple") and not node.args:
            message = f"{name}() without an argument is rejected"
            yield scope.warn("builtin", node, message, "[]" if name == "list" else "()")
        elif name in ("list", "tuple") and first in ("str", "dict", "set", "tensor", "object"):
            message = f"{name} of a {first} is rejected"
            yield scope.warn("builtin", node, message, "a for loop that appends")
        elif name == "dict" and any(item.arg for item in node.keywords):
            message = "dict(name=...) is rejected"
            yield scope.warn("builtin", node, message, "a dict display")
        elif name == "int" and len(node.args) + len(node.keywords) > 1:
            yield scope.warn("builtin", node, "int ignores its base", "int of decimal digits")
        elif name == "print" and any(item.arg for item in node.keywords):
            message = "print with keywords is rejected"
            yield scope.warn("builtin", node, message, "one f-string")
        elif name == "divmod" and len(node.args) > 1 and (literal_int(node.args[1]) or 1) < 1:
            message = "divmod never gives a negative remainder, and takes 0"
            yield scope.warn("arithmetic", node, message, "a positive divisor")
        elif name == "float" and isinstance(node.args[0] if node.args else None, ast.Constant):
            if first == "str" and "e" in str(ast.unparse(node.args[0])).lower():
                message = "float of a string knows no exponents"
                yield scope.warn("builtin", node, message, "a float literal")
        elif name == "isinstance" and len(node.args) > 1 and isinstance(node.args[1], ast.Tuple):
            message = "isinstance with a tuple of types is always False"
            yield scope.warn("builtin", node, message, "one isinstance per type")


def attributes(scope: Scope) -> Iterator[Finding]:
    """Attributes and methods that values do not have."""
    for node in scope.of(ast.Attribute):
        if scope.module.nki_name(node) or not isinstance(node.ctx, ast.Load):
            continue
        kind, name = scope.value(node.value).kind, node.attr
        use = _METHOD_REPLACEMENTS.get(name, "a value computed otherwise")
        if kind == "str":
            message = f"strings have no attributes such as {name}"
            yield scope.warn("string", node, message, "an f-string, or a value made before")
        elif kind in _METHODS and name not in _METHODS[kind]:
            rule = f"{kind}-method" if _METHODS[kind] else "attribute"
            yield scope.warn(rule, node, f"{kind}.{name} does not exist", use)
        elif kind == "tensor" and name not in _TENSOR_ATTRIBUTES:
            message = f"tensors have no attribute {name}"
            yield scope.warn("tensor-attribute", node, message, "shape, .ap, .reshape or .view")
        elif kind == "list" and isinstance(node.value, ast.Subscript):
            if isinstance(node.value.slice, ast.Slice):
                message = f"the slice {ast.unparse(node.value)} has no methods"
                yield scope.warn("list-slice", node, message, "a new list filled in a loop")
        elif not kind and isinstance(scope.parent(node), ast.Call) and not _is_module(scope, node):
            if name in _STRING_METHODS:
                message = f"strings have no attributes such as {name}"
                yield scope.warn("string", node, message, "an f-string, or a value made before")
            elif name in ("sort", "insert"):
                yield scope.warn("list-method", node, f"list.{name} does not exist", use)


def method_calls(scope: Scope) -> Iterator[Finding]:
    """Methods that ignore arguments, or return something else."""
    for node in scope.of(ast.Call):
        if not isinstance(node.func, ast.Attribute) or scope.module.called(node):
            continue
        kind, name = scope.value(node.func.value).kind, node.func.attr
        position = literal_int(node.args[0]) if node.args else None
        if name == "pop" and kind in ("", "list") and position not in (None, -1):
            message = "list.pop ignores its argument and takes the last element"
            yield scope.warn("list-method", node, message, "an index and list slices")
        elif kind == "list" and name == "count":
            message = "list.count returns the length of the list"
            yield scope.warn("list-method", node, message, "a loop that counts")
        elif kind == "list" and name == "index" and len(node.args) > 1:
            message = "list.index ignores where to start"
            yield scope.warn("list-method", node, message, "a loop that compares")


def _is_module(scope: Scope, node: ast.Attribute) -> bool:
    head = scope.module.dotted(node).split(".")[0]
    return scope.module.imported(head, scope.module.scope_of(node)) is not None


def program_axes(scope: Scope) -> Iterator[Finding]:
    """Only axis 0 of the grid exists."""
    for name, call in scope.calls:
        if name in ("nki.language.program_id", "nki.language.num_programs"):
            for axis in [*call.args, *(item.value for item in call.keywords)]:
                if (literal_int(axis) or 0) > 0:
                    message = f"axis {ast.unparse(axis)} of the grid does not exist"
                    yield scope.warn("program-axis", call, message, "axis 0")


RULES: tuple[Rule, ...] = (
    missing_builtins,
    builtin_calls,
    attributes,
    method_calls,
    program_axes,
)
