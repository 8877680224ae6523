"""Level 2: expressions that the open KLR front end rejects or evaluates differently."""

import ast
from collections.abc import Iterator

from .finding import Finding, Kind
from .scope import Rule, Scope, is_none, literal_int

_MAX_LITERAL = 2**31 - 1


def _warn(scope: Scope, rule: str, node: ast.AST, message: str, use: str = "") -> Finding:
    return scope.report(Kind.FRONT_END, rule, node, message, use)


def literals(scope: Scope) -> Iterator[Finding]:
    """Literals that are too large, or silently become None."""
    for node in scope.of(ast.Constant):
        if isinstance(node.value, bytes | complex):
            message = f"{node.value!r} becomes None"
            yield _warn(scope, "literal", node, message, "an int, a float or a string")
        elif type(node.value) is int and _MAX_LITERAL < node.value < 2**32:
            message = f"integer {node.value} is beyond 2147483647"
            yield _warn(scope, "literal", node, message, "a signed 32-bit value")


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
        yield _warn(scope, "star", value, message, "the values one by one, or list addition")


def dict_displays(scope: Scope) -> Iterator[Finding]:
    """Keys of a dict display are string literals."""
    for node in scope.of(ast.Dict):
        for key in node.keys:
            if key is not None and not isinstance(key, ast.Constant):
                message = f"key {ast.unparse(key)} of a dict display is not a literal"
                yield _warn(scope, "dict-display", key, message, "d[key] = value")


def format_specs(scope: Scope) -> Iterator[Finding]:
    """F-strings have no format specifiers."""
    for node in scope.of(ast.FormattedValue):
        if node.format_spec is not None:
            message = f"format specifier {ast.unparse(node.format_spec)} is rejected"
            yield _warn(scope, "format-spec", node, message, "{value} alone")


def comparisons(scope: Scope) -> Iterator[Finding]:
    """Chained comparisons evaluate the middle twice and take no `in`."""
    for node in scope.of(ast.Compare):
        if len(node.ops) < 2:
            continue
        if any(isinstance(operator, ast.In | ast.NotIn) for operator in node.ops):
            message = "`in` inside a chained comparison is rejected"
            yield _warn(scope, "chained-comparison", node, message, "`and`")
        elif any(_calls(middle) for middle in node.comparators[:-1]):
            message = "the middle of a chained comparison is evaluated twice"
            yield _warn(scope, "chained-comparison", node, message, "a variable for the middle")


def _calls(node: ast.expr) -> bool:
    return any(isinstance(child, ast.Call) for child in ast.walk(node))


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
                    yield _warn(scope, "hoisted-operand", child, message, "an if statement")


def arithmetic(scope: Scope) -> Iterator[Finding]:
    """Operators whose results differ from CPython's, or that do not exist."""
    for node in scope.nodes:
        if not isinstance(node, ast.BinOp | ast.AugAssign):
            continue
        right = node.right if isinstance(node, ast.BinOp) else node.value
        value = literal_int(right)
        if isinstance(node.op, ast.MatMult):
            yield _warn(scope, "arithmetic", node, "`@` is rejected", "nisa.nc_matmul")
        elif isinstance(node.op, ast.FloorDiv | ast.Mod) and value is not None and value < 0:
            message = "division by a negative number never gives a negative remainder"
            yield _warn(scope, "arithmetic", node, message, "a positive divisor")
        elif isinstance(node.op, ast.Pow) and value is not None and value < 0:
            message = "a negative integer exponent counts as 0"
            yield _warn(scope, "arithmetic", node, message, "1.0 / x, or a float exponent")
        elif isinstance(node.op, ast.Mod | ast.Mult) and _is_string(node):
            yield _warn(scope, "string", node, "strings have no % and no *", "an f-string")


def _is_string(node: ast.BinOp | ast.AugAssign) -> bool:
    left = node.left if isinstance(node, ast.BinOp) else node.target
    return isinstance(left, ast.Constant) and isinstance(left.value, str)


def subscripts(scope: Scope) -> Iterator[Finding]:
    """Indexes that mean something else or are rejected."""
    for node in scope.of(ast.Subscript):
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for item in items:
            if is_none(item):
                message = "None in an index takes a full slice and adds no axis"
                yield _warn(scope, "index", item, message, ".expand_dim or .reshape")
            elif isinstance(item, ast.List):
                message = "a list as an index is rejected"
                yield _warn(scope, "index", item, message, "slices or .ap()")


RULES: tuple[Rule, ...] = (
    literals,
    stars,
    dict_displays,
    format_specs,
    comparisons,
    hoisted_operands,
    arithmetic,
    subscripts,
)
