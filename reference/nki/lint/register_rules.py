"""Level 1: registers where the kernel is built, which is before they have a value."""

import ast
from collections.abc import Iterator

from .finding import Finding, Kind
from .scope import Rule, Scope, is_none

_CONVERSIONS = ("int", "range", "bool", "float", "round", "divmod", "min", "max", "abs")
_WRITES = ("nki.isa.register_move", "nki.isa.register_load")
_MASKING = "arithmetic masking on the device, or nl.while_loop"


def _is_register(scope: Scope, node: ast.AST) -> bool:
    return scope.value(node).kind == "register"


def conditions(scope: Scope) -> Iterator[Finding]:
    """A register in if, while, assert, `and`, `or`, `not` or a conditional expression."""
    for node in scope.nodes:
        if isinstance(node, ast.While) and _is_register(scope, node.test):
            message = f"while on register {ast.unparse(node.test)} is deprecated since 0.6.0"
            use = "nl.while_loop(init, body)"
            yield scope.report(Kind.DEPRECATED, "while-register", node, message, use)
        else:
            for register in _tested(scope, _condition(scope, node)):
                message = f"register {ast.unparse(register)} in a Python condition"
                yield scope.report(Kind.REJECTED, "register-condition", node, message, _MASKING)


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
                    yield scope.report(Kind.REJECTED, "register-condition", node, message, use)
        elif isinstance(node, ast.Subscript):
            sequence = scope.value(node.value).kind in ("list", "tuple", "str")
            if sequence and _is_register(scope, node.slice):
                message = f"register {ast.unparse(node.slice)} as the index of a Python sequence"
                use = "a tensor that holds the values, read at .ap(scalar_offset=...)"
                yield scope.report(Kind.REJECTED, "register-condition", node, message, use)


def arithmetic(scope: Scope) -> Iterator[Finding]:
    """Python arithmetic on the register that counts a loop."""
    for node in scope.of(ast.BinOp):
        for side in (node.left, node.right):
            if isinstance(side, ast.Name) and loop_of(scope, side) is not None:
                message = f"Python arithmetic on loop register {side.id}"
                use = "a step of the loop, a stride of .ap(), or arithmetic on a [1, 1] tile"
                yield scope.report(Kind.REJECTED, "register-arithmetic", node, message, use)


def loop_of(scope: Scope, node: ast.Name) -> ast.AST | None:
    """Return the loop whose counting register a name is."""
    found = scope.module.bindings.find(node.id, scope.module.scope_of(node))
    place = found[0] if found is not None and found[1] == [None] else None
    for body, loop in scope.bodies.items():
        first = body.args.args[0].arg if body.args.args else ""
        if loop == "fori_loop" and place is body and first == node.id:
            return body
    for loop_node in scope.of(ast.For):
        named = isinstance(loop_node.target, ast.Name) and loop_node.target.id == node.id
        if named and scope.module.called(loop_node.iter) == "nki.language.dynamic_range":
            return loop_node
    return None


def induction_writes(scope: Scope) -> Iterator[Finding]:
    """The register that counts a dynamic loop is read only."""
    for name, node in scope.calls:
        if name not in _WRITES:
            continue
        targets = node.args[:1] + [item.value for item in node.keywords if item.arg == "dst"]
        for target in targets:
            loop = loop_of(scope, target) if isinstance(target, ast.Name) else None
            if loop is not None and any(child is node for child in ast.walk(loop)):
                message = f"write to loop register {ast.unparse(target)}"
                use = "a condition in nl.while_loop to leave early"
                yield scope.report(Kind.REJECTED, "induction-write", node, message, use)


RULES: tuple[Rule, ...] = (conditions, conversions, arithmetic, induction_writes)
