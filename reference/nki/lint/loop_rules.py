"""The loops that run on the device, and their bodies."""

import ast
from collections.abc import Iterator

from .bindings import FUNCTION_TYPES, Function
from .finding import Finding, Kind
from .loops import DYNAMIC_LOOPS
from .scope import Rule, Scope, literal_int
from .value import RUN_TIME

_CONDITION = "return of the condition register"
_BOUNDS = ("lower", "upper")
_LOADED = "nisa.scalar_load(tile)"
_WRITES = ("nki.isa.register_move", "nki.isa.register_load")


def dynamic_loops(scope: Scope, root: ast.AST) -> Iterator[ast.AST]:
    """Yield the calls of loop functions in a node."""
    yield from (node for node in ast.walk(root) if scope.module.called(node) in DYNAMIC_LOOPS)


def reordering(scope: Scope) -> Iterator[Finding]:
    """A dynamic loop cannot sit inside nl.no_reorder()."""
    for block in scope.of(ast.With):
        managers = [scope.module.called(item.context_expr) for item in block.items]
        if "nki.language.no_reorder" in managers:
            for node in dynamic_loops(scope, block):
                message = "dynamic loop inside nl.no_reorder()"
                use = "nl.no_reorder() inside the loop body"
                yield scope.report(Kind.REFUSED, "loop-in-no-reorder", node, message, use)


def bodies(scope: Scope) -> Iterator[Finding]:
    """fori_loop bodies return nothing; while_loop bodies return the condition."""
    for body, loop in scope.bodies.items():
        if body is scope.function and not isinstance(scope.module.scope_of(body), ast.Module):
            continue  # reported with the function around it
        returns = [node for node in ast.walk(body) if isinstance(node, ast.Return)]
        returns = [node for node in returns if scope.module.scope_of(node) is body]
        if loop == "fori_loop":
            for node in returns:
                if node.value is not None and not _is_none(node.value):
                    message = f"{body.name} returns a value to nl.fori_loop"
                    use = "state in SBUF or HBM that the body updates in place"
                    yield scope.report(Kind.REFUSED, "fori-loop-body", node, message, use)
        elif not any(node.value is not None for node in returns):
            message = f"{body.name} returns no condition to nl.while_loop"
            yield scope.report(Kind.REFUSED, "while-loop-body", body, message, _CONDITION)
        else:
            for node in returns:
                kind = scope.value(node.value).kind if node.value is not None else "none"
                if kind not in ("", "register"):
                    message = f"{body.name} returns a {kind} as the condition of nl.while_loop"
                    yield scope.report(Kind.REFUSED, "while-loop-body", node, message, _CONDITION)
        yield from _parameters(scope, body, loop)


def _parameters(scope: Scope, body: Function, loop: str) -> Iterator[Finding]:
    """Yield what is wrong with the number of parameters of a body."""
    args = body.args
    required = len(args.posonlyargs) + len(args.args) - len(args.defaults)
    most = len(args.posonlyargs) + len(args.args)
    if required > 1 or (most < 1 and args.vararg is None):
        message = f"{body.name} takes {required} arguments; nl.{loop} gives one"
        use = f"def {body.name}(i)" if loop == "fori_loop" else f"def {body.name}(register)"
        yield scope.report(Kind.REFUSED, f"{loop.replace('_', '-')}-body", body, message, use)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def steps(scope: Scope) -> Iterator[Finding]:
    """Dynamic loops count up by a compile-time step."""
    for name, node in scope.calls:
        if name != "nki.language.fori_loop":
            continue
        given = node.args[3:4]
        given += [item.value for item in node.keywords if item.arg == "step"]
        for step in given:
            value = literal_int(step)
            at_run_time = scope.value(step).kind in RUN_TIME
            if at_run_time or (value is not None and value < 1):
                message = f"nl.fori_loop step {ast.unparse(step)}"
                use = "a positive compile-time integer; the loop only counts up"
                yield scope.report(Kind.REFUSED, "fori-loop-step", step, message, use)


def bounds(scope: Scope) -> Iterator[Finding]:
    """Bounds are integers, scalars or registers, conditions registers."""
    for name, call in scope.calls:
        if name not in DYNAMIC_LOOPS:
            continue
        loop = name.rpartition(".")[2]
        given = call.args[:2] if loop == "fori_loop" else call.args[:1]
        names = _BOUNDS if loop == "fori_loop" else ("init",)
        given += [item.value for item in call.keywords if item.arg in names]
        allowed: tuple[str, ...] = ("", "register")  # or what is not known
        what, use = "condition", "nisa.register_alloc(1)"
        if loop == "fori_loop":
            allowed, what, use = ("", "int", *RUN_TIME), "bound", _LOADED
        for value in given:
            kind = scope.value(value).kind
            if kind not in allowed and kind != "nki":
                message = f"{ast.unparse(value)} ({kind}) as a {what} of nl.{loop}"
                yield scope.report(Kind.REFUSED, "loop-bound", value, message, use)


def carried_registers(scope: Scope) -> Iterator[Finding]:
    """A register that an inner dynamic loop carries on does not compile (known issue, 0.4.0)."""
    if not any(name in _WRITES for name, _ in scope.calls):
        return
    inner: set[ast.AST] = set()
    for outer in dynamic_loops(scope, scope.function):
        for region in _regions(scope, outer):
            inner |= {loop for loop in dynamic_loops(scope, region) if loop is not region}
    for loop in sorted(inner, key=lambda node: getattr(node, "lineno", 0)):
        for region in _regions(scope, loop):
            for register in _written(scope, region):
                message = f"register {register} is carried through nested dynamic loops"
                use = "range for the outer loop, or the value in a [1, 1] tile in SBUF"
                yield scope.report(Kind.REFUSED, "nested-dynamic-loop", loop, message, use)


def _regions(scope: Scope, loop: ast.AST) -> list[ast.AST]:
    """Return the code that a dynamic loop repeats."""
    names = {node.id for node in ast.walk(loop) if isinstance(node, ast.Name)}
    return [body for body in scope.bodies if body.name in names and body is not scope.function]


def _written(scope: Scope, region: ast.AST) -> list[str]:
    """Return the registers from outside of a region that it writes."""
    inside = set(ast.walk(region))
    written = set()
    for node in inside:
        if isinstance(node, ast.Call) and scope.module.called(node) in _WRITES:
            targets = node.args[:1] + [item.value for item in node.keywords if item.arg == "dst"]
            for target in targets:
                if isinstance(target, ast.Name) and not _bound_inside(scope, target, inside):
                    written.add(target.id)
    return sorted(written)


def _bound_inside(scope: Scope, name: ast.Name, inside: set[ast.AST]) -> bool:
    found = scope.module.bindings.find(name.id, scope.module.scope_of(name))
    if found is None:
        return True
    where: ast.AST | Function = found[0]
    if where in inside and isinstance(where, FUNCTION_TYPES):
        return True
    return any(isinstance(item, ast.AST) and item in inside for item in found[1])


RULES: tuple[Rule, ...] = (
    reordering,
    bodies,
    steps,
    bounds,
    carried_registers,
)
