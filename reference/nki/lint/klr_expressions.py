"""Level 2: literals, displays and indexes as the open KLR front end takes them."""

import ast
from collections.abc import Iterator

from .finding import Finding
from .nki_names import dotted
from .scope import Rule, Scope, is_none, literal_int

_MAX_LITERAL = 2**31 - 1


def literals(scope: Scope) -> Iterator[Finding]:
    """Literals that are too large, or silently become None."""
    for node in scope.of(ast.Constant):
        if isinstance(node.value, bytes | complex):
            message = f"{node.value!r} becomes None"
            yield scope.warn("literal", node, message, "an int, a float or a string")
        elif type(node.value) is int and _MAX_LITERAL < node.value < 2**32:
            message = f"integer {node.value} is beyond 2147483647"
            yield scope.warn("literal", node, message, "a signed 32-bit value")
        elif node.value is Ellipsis and not _in_subscript(scope, node):
            yield scope.warn("ellipsis", node, "... outside a subscript is rejected", "pass")


def _in_subscript(scope: Scope, node: ast.AST) -> bool:
    parent = scope.parent(node)
    if isinstance(parent, ast.Tuple):
        node, parent = parent, scope.parent(parent)
    return isinstance(parent, ast.Subscript) and parent.slice is node


def stars(scope: Scope) -> Iterator[Finding]:
    """Star expansions in calls and displays."""
    expanded: list[ast.expr] = []
    for node in scope.nodes:
        if isinstance(node, ast.Starred) and isinstance(node.ctx, ast.Load):
            expanded.append(node.value)
        elif isinstance(node, ast.Call):
            expanded += [keyword.value for keyword in node.keywords if keyword.arg is None]
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            expanded += [value for key, value in pairs if key is None]
    for value in expanded:
        message = f"expansion of {ast.unparse(value)} is rejected"
        yield scope.warn("star", value, message, "the values one by one, or list addition")


def dict_displays(scope: Scope) -> Iterator[Finding]:
    """Keys of a dict display are string literals."""
    for node in scope.of(ast.Dict):
        for key in node.keys:
            other = key is not None and not isinstance(key, ast.Constant)
            if other and key is not None and scope.value(key).kind in ("", "str"):
                message = f"key {ast.unparse(key)} of a dict display is not a literal"
                yield scope.warn("dict-display", key, message, "d[key] = value")


def format_specs(scope: Scope) -> Iterator[Finding]:
    """F-strings have no format specifiers."""
    for node in scope.of(ast.FormattedValue):
        if node.format_spec is not None:
            message = f"format specifier {ast.unparse(node.format_spec)} is rejected"
            yield scope.warn("format-spec", node, message, "{value} alone")


def hoisted_operands(scope: Scope) -> Iterator[Finding]:
    """What and, or and a conditional expression would skip is evaluated all the same."""
    for node in scope.nodes:
        if not isinstance(node, ast.BoolOp | ast.IfExp):
            continue
        skipped = node.values[1:] if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
        for operand in skipped:
            for child in ast.walk(operand):
                if isinstance(child, ast.Attribute) and isinstance(
                    child.value, ast.Call | ast.Subscript
                ):
                    message = f"{ast.unparse(child.value)} is evaluated even where this is skipped"
                    yield scope.warn("hoisted-operand", child, message, "an if statement")


def subscripts(scope: Scope) -> Iterator[Finding]:
    """Indexes that mean something else or are rejected."""
    for node in scope.of(ast.Subscript):
        base = scope.value(node.value).kind
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for item in items:
            yield from _index(scope, item, base)
        if base == "str" and isinstance(node.ctx, ast.Load):
            message = f"{ast.unparse(node)}: strings are not indexed"
            yield scope.warn("string", node, message, "a list of strings")


def _index(scope: Scope, item: ast.expr, base: str) -> Iterator[Finding]:
    kind = scope.value(item).kind
    if is_none(item) or dotted(item) in ("np.newaxis", "numpy.newaxis"):
        message = "None in an index takes a full slice and adds no axis"
        yield scope.warn("index", item, message, ".expand_dim or .reshape")
    elif isinstance(item, ast.List):
        yield scope.warn("index", item, "a list as an index is rejected", "slices or .ap()")
    elif isinstance(item, ast.Slice):
        if (literal_int(item.step) or 1) < 1:
            message = "slices have positive steps"
            yield scope.warn("slice-step", item, message, "a loop over range(n - 1, -1, -1)")
        bounds = (item.lower, item.upper)
        if base == "tensor" and any(_is_register(scope, bound) for bound in bounds):
            yield _register_index(scope, item)
    elif base == "tensor":
        if (literal_int(item) or 0) < 0:
            message = f"negative index {ast.unparse(item)} of a tensor is rejected"
            yield scope.warn("tensor-index", item, message, "t.shape[...] - 1, a slice from it")
        elif kind == "register":
            yield _register_index(scope, item)
        elif kind in ("list", "tuple", "tensor"):
            message = f"a {kind} as an index is rejected"
            yield scope.warn("index", item, message, "slices or .ap()")


def _is_register(scope: Scope, node: ast.expr | None) -> bool:
    return node is not None and scope.value(node).kind == "register"


def _register_index(scope: Scope, item: ast.expr) -> Finding:
    message = f"a register as an index of a tensor ({ast.unparse(item)}) is rejected"
    return scope.warn("register-index", item, message, ".ap(pattern, scalar_offset=register)")


RULES: tuple[Rule, ...] = (
    literals,
    stars,
    dict_displays,
    format_specs,
    hoisted_operands,
    subscripts,
)
