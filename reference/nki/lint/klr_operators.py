"""Level 2: operators that the open KLR front end does not have, or evaluates differently."""

import ast
from collections.abc import Iterator

from .finding import Finding
from .register_rules import loop_of
from .scope import Rule, Scope, literal_int
from .value import NUMBERS, SEQUENCES, Value

_BIT_OPERATORS = (ast.LShift, ast.RShift, ast.BitAnd, ast.BitOr, ast.BitXor)
_SHIFTS = (ast.LShift, ast.RShift)
_PURE = ("len", "min", "max", "abs", "int")
_DIVISIONS = (ast.FloorDiv, ast.Mod)


def binary(scope: Scope) -> Iterator[Finding]:
    """Binary operators, also in augmented assignments."""
    for node in scope.nodes:
        if isinstance(node, ast.BinOp):
            yield from _operator(scope, node, node.left, node.op, node.right)
        elif isinstance(node, ast.AugAssign):
            yield from _operator(scope, node, node.target, node.op, node.value)


def _operator(
    scope: Scope, node: ast.AST, left: ast.expr, operator: ast.operator, right: ast.expr
) -> Iterator[Finding]:
    one, two = scope.value(left), scope.value(right)
    if isinstance(operator, ast.MatMult):
        yield scope.warn("arithmetic", node, "`@` is rejected", "nisa.nc_matmul")
    elif "tensor" in (one.kind, two.kind):
        message = "operators on tensors are rejected"
        yield scope.warn("tensor-operator", node, message, "nisa.tensor_tensor or tensor_scalar")
    elif "register" in (one.kind, two.kind):
        if any(isinstance(side, ast.Name) and loop_of(scope, side) for side in (left, right)):
            return  # level 1
        message = "operators on registers are rejected"
        use = "arithmetic on a [1, 1] tile, and nisa.register_load"
        yield scope.warn("register-operator", node, message, use)
    elif one.kind in NUMBERS and (two.kind in NUMBERS or not two.kind):
        yield from _numbers(scope, node, one, operator, two, literal_int(left), literal_int(right))
    elif two.kind in NUMBERS and not one.kind:
        yield from _numbers(scope, node, one, operator, two, None, literal_int(right))
    elif one.kind == "str" and isinstance(operator, ast.Mod | ast.Mult):
        yield scope.warn("string", node, "strings have no % and no *", "an f-string")
    elif {one.kind, two.kind} == set(SEQUENCES) and isinstance(operator, ast.Add):
        message = "a list and a tuple cannot be added"
        yield scope.warn("sequence-add", node, message, "two lists or two tuples")


def _numbers(
    scope: Scope,
    node: ast.AST,
    one: Value,
    operator: ast.operator,
    two: Value,
    left: int | None,
    right: int | None,
) -> Iterator[Finding]:
    """Yield what differs for numbers; `left` and `right` are literals, None for all else."""
    kinds = one.kind, two.kind
    bits = isinstance(operator, _BIT_OPERATORS)
    if kinds in (("bool", "bool"), ("bool", "float"), ("float", "bool")):
        message = f"{kinds[0]} and {kinds[1]} have no operators"
        yield scope.warn("bool-arithmetic", node, message, "int(...) first, or and / or")
    elif "float" in kinds and (bits or isinstance(operator, ast.Mod)):
        message = "floats have no % and no bit operators"
        yield scope.warn("float-operator", node, message, "integers")
    elif bits and ((left or 0) < 0 or (right or 0) < 0):
        message = "bit operations are on unsigned 64-bit values"
        yield scope.warn("arithmetic", node, message, "non-negative operands")
    elif isinstance(operator, _SHIFTS) and right is not None and right > 63:
        message = "the shift count is taken modulo 64"
        yield scope.warn("arithmetic", node, message, "a count below 32")
    elif isinstance(operator, _DIVISIONS) and right is not None and right < 0:
        message = "division by a negative number never gives a negative remainder"
        yield scope.warn("arithmetic", node, message, "a positive divisor")
    elif isinstance(operator, _DIVISIONS) and right == 0:
        message = "division of integers by zero is not refused"
        yield scope.warn("arithmetic", node, message, "a positive divisor")
    elif isinstance(operator, ast.Pow) and right is not None and right < 0:
        message = "a negative integer exponent counts as 0"
        yield scope.warn("arithmetic", node, message, "1.0 / x, or a float exponent")


def unary(scope: Scope) -> Iterator[Finding]:
    """Minus of a bool or tensor, inversion."""
    for node in scope.of(ast.UnaryOp):
        kind = scope.value(node.operand).kind
        if isinstance(node.op, ast.USub | ast.UAdd) and kind == "bool":
            message = "a bool cannot be negated"
            yield scope.warn("bool-arithmetic", node, message, "int(...) first, or not")
        elif isinstance(node.op, ast.USub | ast.Invert) and kind == "tensor":
            message = "operators on tensors are rejected"
            yield scope.warn("tensor-operator", node, message, "nisa.tensor_scalar")
        elif isinstance(node.op, ast.Invert) and kind == "int":
            message = "~ is computed in 32 bits"
            yield scope.warn("arithmetic", node, message, "a mask minus the value")


def comparisons(scope: Scope) -> Iterator[Finding]:
    """Comparisons whose results differ, or that are rejected."""
    for node in scope.of(ast.Compare):
        if len(node.ops) > 1:
            yield from _chain(scope, node)
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            yield from _comparison(scope, node, left, operator, right)
            left = right


def _chain(scope: Scope, node: ast.Compare) -> Iterator[Finding]:
    if any(isinstance(operator, ast.In | ast.NotIn) for operator in node.ops):
        message = "`in` inside a chained comparison is rejected"
        yield scope.warn("chained-comparison", node, message, "`and`")
    elif any(_calls(middle) for middle in node.comparators[:-1]):
        message = "the middle of a chained comparison is evaluated twice"
        yield scope.warn("chained-comparison", node, message, "a variable for the middle")
    elif _calls(node.comparators[-1]):
        message = "the end of a chained comparison is evaluated even if the start is false"
        yield scope.warn("chained-comparison", node, message, "`and`")


def _calls(node: ast.expr) -> bool:
    """Whether an expression calls anything but len, min, max, abs and int."""
    calls = (child for child in ast.walk(node) if isinstance(child, ast.Call))
    return any(ast.unparse(call.func) not in _PURE for call in calls)


def _comparison(
    scope: Scope, node: ast.Compare, left: ast.expr, operator: ast.cmpop, right: ast.expr
) -> Iterator[Finding]:
    one, two = scope.value(left), scope.value(right)
    kinds = {one.kind, two.kind}
    equality = isinstance(operator, ast.Eq | ast.NotEq)
    if isinstance(operator, ast.In | ast.NotIn):
        yield from _membership(scope, node, one, two)
    elif isinstance(operator, ast.Is | ast.IsNot):
        return
    elif len(kinds) == 2 and kinds < set(NUMBERS):
        message = f"{one.kind} and {two.kind} never compare equal"
        yield scope.warn("mixed-comparison", node, message, "two ints or two floats")
    elif "register" in kinds:
        if _is_tested(scope, node) or "none" in kinds:
            return  # level 1
        message = "registers compare as objects, not by value"
        yield scope.warn("register-operator", node, message, "nl.while_loop, or masks on tiles")
    elif equality and one.kind == two.kind == "list" and "list" in (_item(one), _item(two)):
        message = "lists in lists compare by identity"
        yield scope.warn("nested-equality", node, message, "one comparison per inner list")
    elif equality and one.kind == two.kind == "object":
        message = "objects compare by their fields, not by identity"
        yield scope.warn("nested-equality", node, message, "a field that tells them apart")


def _is_tested(scope: Scope, node: ast.AST) -> bool:
    """Whether a comparison is part of the condition of a statement."""
    parent = scope.parent(node)
    while isinstance(parent, ast.BoolOp | ast.UnaryOp):
        node, parent = parent, scope.parent(parent)
    return getattr(parent, "test", None) is node


def _membership(scope: Scope, node: ast.Compare, one: Value, two: Value) -> Iterator[Finding]:
    by_identity = ("enum", "object", "list")
    if two.kind == "dict":
        message = "`in` does not look into dicts"
        yield scope.warn("in-dict", node, message, "d.get(key) == None, or a list of the keys")
    elif one.kind in by_identity or _item(two) in by_identity:
        message = "`in` finds enum members, lists and objects by identity only"
        yield scope.warn("in-objects", node, message, "== with each, joined by or")


def _item(value: Value) -> str:
    return value.item.kind if value.item is not None else ""


def truth_of_dicts(scope: Scope) -> Iterator[Finding]:
    """An empty dict counts as true."""
    for node in scope.nodes:
        tested: list[ast.expr] = []
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            tested = [node.test]
        elif isinstance(node, ast.BoolOp):
            tested = node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            tested = [node.operand]
        for test in tested:
            if scope.value(test).kind == "dict" and not isinstance(test, ast.BoolOp):
                message = f"{ast.unparse(test)}: an empty dict counts as true"
                yield scope.warn("dict-truth", test, message, "len(d) > 0")


RULES: tuple[Rule, ...] = (binary, unary, comparisons, truth_of_dicts)
