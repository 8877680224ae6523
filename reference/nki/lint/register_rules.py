"""Level 1: registers in Python control flow, and the loops that run on the device."""

import ast
from collections.abc import Iterator

from .finding import Finding, Kind
from .scope import Rule, Scope, literal_int

_DYNAMIC_CALLS = ("nki.language.fori_loop", "nki.language.while_loop")
_DYNAMIC_RANGE = "nki.language.dynamic_range"
_WRITES = ("nki.isa.register_move", "nki.isa.register_load")


def python_control_flow(scope: Scope) -> Iterator[Finding]:
    """A register has no value while the kernel is built: no if, while, int() or range()."""
    registers = _allocated(scope) | set(_induction(scope))
    for node in scope.nodes:
        if not isinstance(node, ast.If | ast.While | ast.IfExp):
            continue
        for name in _tested(node.test):
            if name not in registers:
                continue
            if isinstance(node, ast.While):
                message = f"while on register {name} is deprecated since 0.6.0"
                yield scope.report(
                    Kind.DEPRECATED, "while-register", node, message, "nl.while_loop(init, body)"
                )
            else:
                message = f"register {name} in a Python condition"
                use = "arithmetic masking on the device, or nl.while_loop"
                yield scope.report(Kind.REJECTED, "register-condition", node, message, use)
    for call in scope.of(ast.Call):
        if isinstance(call.func, ast.Name) and call.func.id in ("int", "range", "bool"):
            for argument in call.args:
                if isinstance(argument, ast.Name) and argument.id in registers:
                    message = f"{call.func.id}() of register {argument.id}"
                    use = "nl.fori_loop with the register as a bound"
                    yield scope.report(Kind.REJECTED, "register-condition", call, message, use)


def _tested(test: ast.expr) -> Iterator[str]:
    """Yield the names whose value a condition needs."""
    if isinstance(test, ast.Name):
        yield test.id
    elif isinstance(test, ast.UnaryOp):
        yield from _tested(test.operand)
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _tested(value)
    elif isinstance(test, ast.Compare):
        for side in [test.left, *test.comparators]:
            yield from _tested(side)


def _allocated(scope: Scope) -> set[str]:
    """Return the names that only ever hold a result of nisa.register_alloc."""
    registers: set[str] = set()
    others: set[str] = set()
    for node in scope.of(ast.Assign):
        is_register = scope.module.called(node.value) == "nki.isa.register_alloc"
        for target in node.targets:
            if isinstance(target, ast.Name):
                (registers if is_register else others).add(target.id)
    return registers - others


def _induction(scope: Scope) -> dict[str, ast.AST]:
    """Return the loop variables of dynamic_range loops and fori_loop bodies."""
    found: dict[str, ast.AST] = {}
    for node in scope.of(ast.For):
        if scope.module.called(node.iter) == _DYNAMIC_RANGE and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    for body in _bodies(scope, "fori_loop"):
        for arg in body.args.args[:1]:
            found[arg.arg] = body
    return found


def _bodies(scope: Scope, loop: str) -> list[ast.FunctionDef]:
    names = scope.module.loop_bodies(scope.function)
    return [node for node in scope.of(ast.FunctionDef) if names.get(node.name) == loop]


def induction_writes(scope: Scope) -> Iterator[Finding]:
    """The register that counts a dynamic loop is read only."""
    induction = _induction(scope)
    for name, node in scope.calls:
        if name not in _WRITES:
            continue
        targets = node.args[:1] + [item.value for item in node.keywords if item.arg == "dst"]
        for target in targets:
            loop = induction.get(target.id) if isinstance(target, ast.Name) else None
            if loop is not None and any(child is node for child in ast.walk(loop)):
                message = f"write to loop register {ast.unparse(target)}"
                use = "a condition in nl.while_loop to leave early"
                yield scope.report(Kind.REJECTED, "induction-write", node, message, use)


def reordering(scope: Scope) -> Iterator[Finding]:
    """A dynamic loop cannot sit inside nl.no_reorder()."""
    for block in scope.of(ast.With):
        managers = [scope.module.called(item.context_expr) for item in block.items]
        if "nki.language.no_reorder" not in managers:
            continue
        for node in ast.walk(block):
            call = node.iter if isinstance(node, ast.For) else node
            name = scope.module.called(call)
            if name in _DYNAMIC_CALLS or (name == _DYNAMIC_RANGE and isinstance(node, ast.For)):
                use = "nl.no_reorder() inside the loop body"
                message = "dynamic loop inside nl.no_reorder()"
                yield scope.report(Kind.REJECTED, "loop-in-no-reorder", node, message, use)


def loop_bodies(scope: Scope) -> Iterator[Finding]:
    """fori_loop bodies return nothing and count up; while_loop bodies return the condition."""
    for body in _bodies(scope, "fori_loop"):
        for node in ast.walk(body):
            if isinstance(node, ast.Return) and node.value is not None:
                message = f"{body.name} returns a value to nl.fori_loop"
                use = "state in SBUF or HBM that the body updates in place"
                yield scope.report(Kind.REJECTED, "fori-loop-body", node, message, use)
    for body in _bodies(scope, "while_loop"):
        returns = [node for node in ast.walk(body) if isinstance(node, ast.Return)]
        if not any(node.value is not None for node in returns):
            message = f"{body.name} returns no condition to nl.while_loop"
            yield scope.report(
                Kind.REJECTED, "while-loop-body", body, message, "return of the condition register"
            )
    for name, node in scope.calls:
        if name == "nki.language.fori_loop":
            steps = node.args[3:4] + [item.value for item in node.keywords if item.arg == "step"]
            for step in steps:
                value = literal_int(step)
                if value is not None and value < 1:
                    message = f"nl.fori_loop step {value}"
                    use = "a positive compile-time integer; the loop only counts up"
                    yield scope.report(Kind.REJECTED, "fori-loop-step", step, message, use)


RULES: tuple[Rule, ...] = (python_control_flow, induction_writes, reordering, loop_bodies)
