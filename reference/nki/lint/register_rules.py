"""Registers and scalars where the kernel is built, which is before they have a value."""

import ast
from collections.abc import Iterator

from .finding import Finding, Kind
from .scope import Rule, Scope, is_none
from .value import RUN_TIME

_CONVERSIONS = ("int", "range", "bool", "float", "round", "divmod", "min", "max", "abs")
_WRITES = ("nki.isa.register_move", "nki.isa.register_load")
_MASKING = "arithmetic masking on the device, or nl.while_loop"


def _is_register(scope: Scope, node: ast.AST) -> bool:
    return scope.value(node).kind in RUN_TIME


def conditions(scope: Scope) -> Iterator[Finding]:
    """A register in if, while, assert, `and`, `or`, `not` or a conditional expression."""
    for node in scope.nodes:
        if isinstance(node, ast.While) and _is_register(scope, node.test):
            message = f"while on register {ast.unparse(node.test)}: removed in 0.7.0"
            use = "nl.while_loop(init, body)"
            yield scope.report(Kind.REMOVED, "while-register", node, message, use)
        else:
            for register in _tested(scope, _condition(scope, node)):
                message = f"register {ast.unparse(register)} in a Python condition"
                yield scope.report(Kind.REFUSED, "register-condition", node, message, _MASKING)


def _condition(scope: Scope, node: ast.AST) -> ast.expr | None:
    """Return the condition of a statement, or `and`, `or`, `not` that are no part of one."""
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        return node.test
    inverts = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    if not inverts and not isinstance(node, ast.BoolOp):
        return None
    parent = scope.parent(node)
    inner = isinstance(parent, ast.BoolOp | ast.UnaryOp) or getattr(parent, "test", None) is node
    return None if inner or not isinstance(node, ast.expr) else node


def _tested(scope: Scope, test: ast.expr | None) -> Iterator[ast.expr]:
    """Yield the registers whose value a condition needs."""
    if test is None:
        return
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _tested(scope, test.operand)
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _tested(scope, value)
    elif isinstance(test, ast.Compare):
        sides = [test.left, *test.comparators]
        identity = any(isinstance(item, ast.Is | ast.IsNot) for item in test.ops)
        if not identity and not any(is_none(side) for side in sides):
            yield from (side for side in sides if _is_register(scope, side))
    elif _is_register(scope, test):
        yield test


def conversions(scope: Scope) -> Iterator[Finding]:
    """A register as int(), float(), range(), a Python index or a shape."""
    for node in scope.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            builtin = name in _CONVERSIONS and scope.is_builtin(name, node)
            for argument in node.args if builtin else ():
                if _is_register(scope, argument):
                    message = f"{name}() of register {ast.unparse(argument)}"
                    use = "nl.fori_loop with the register as a bound"
                    if name != "range":
                        use = "the register itself as an operand, offset or loop bound"
                    yield scope.report(Kind.REFUSED, "register-condition", node, message, use)
        elif isinstance(node, ast.Subscript):
            sequence = scope.value(node.value).kind in ("list", "tuple", "str")
            if sequence and _is_register(scope, node.slice):
                message = f"register {ast.unparse(node.slice)} as the index of a Python sequence"
                use = "a tensor that holds the values, read at .ap(scalar_offset=...)"
                yield scope.report(Kind.REFUSED, "register-condition", node, message, use)


def arithmetic(scope: Scope) -> Iterator[Finding]:
    """Python arithmetic on a register."""
    for node in scope.of(ast.BinOp):
        for side in (node.left, node.right):
            if scope.value(side).kind == "register":
                message = f"Python arithmetic on register {ast.unparse(side)}"
                use = "nisa.scalar_load, whose value has +, - and *"
                yield scope.report(Kind.REFUSED, "register-arithmetic", node, message, use)


def induction_writes(scope: Scope) -> Iterator[Finding]:
    """What counts a dynamic loop is read only."""
    counters = {
        body.args.args[0].arg: body
        for body, loop in scope.bodies.items()
        if loop == "fori_loop" and body.args.args
    }
    for name, node in scope.calls:
        targets = node.args[:1] + [item.value for item in node.keywords if item.arg == "dst"]
        for target in targets if name in _WRITES else ():
            body = counters.get(target.id) if isinstance(target, ast.Name) else None
            if body is not None and any(child is node for child in ast.walk(body)):
                message = f"write to {ast.unparse(target)}, which counts the loop"
                use = "a condition in nl.while_loop to leave early"
                yield scope.report(Kind.REFUSED, "induction-write", node, message, use)


RULES: tuple[Rule, ...] = (conditions, conversions, arithmetic, induction_writes)
