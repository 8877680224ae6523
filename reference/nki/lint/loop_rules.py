"""Level 1: the loops that run on the device, and their bodies."""

import ast
from collections.abc import Iterator

from .bindings import FUNCTION_TYPES, Function
from .finding import Finding, Kind
from .loops import DYNAMIC_LOOPS
from .scope import Rule, Scope, literal_int

DYNAMIC_RANGE = "nki.language.dynamic_range"
_CONDITION = "return of the condition register"
_REGISTERS: tuple[str, ...] = ("", "register")  # or what is not known
_BOUNDS = ("lower", "upper", "start", "stop")
_LOADED = "register = nisa.register_alloc(), then nisa.register_load(register, tile)"
_WRITES = ("nki.isa.register_move", "nki.isa.register_load")


def dynamic_loops(scope: Scope, root: ast.AST) -> Iterator[ast.AST]:
    """Yield the dynamic loops in a node: for and while statements, calls of loop functions."""
    for node in ast.walk(root):
        if isinstance(node, ast.For):
            if scope.module.called(node.iter) == DYNAMIC_RANGE:
                yield node
        elif isinstance(node, ast.While):
            if scope.value(node.test).kind == "register":
                yield node
        elif scope.module.called(node) in DYNAMIC_LOOPS:
            yield node


def reordering(scope: Scope) -> Iterator[Finding]:
    """A dynamic loop cannot sit inside nl.no_reorder()."""
    for block in scope.of(ast.With):
        managers = [scope.module.called(item.context_expr) for item in block.items]
        if "nki.language.no_reorder" in managers:
            for node in dynamic_loops(scope, block):
                message = "dynamic loop inside nl.no_reorder()"
                use = "nl.no_reorder() inside the loop body"
                yield scope.report(Kind.REJECTED, "loop-in-no-reorder", node, message, use)


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
                    yield scope.report(Kind.REJECTED, "fori-loop-body", node, message, use)
        elif not any(node.value is not None for node in returns):
            message = f"{body.name} returns no condition to nl.while_loop"
            yield scope.report(Kind.REJECTED, "while-loop-body", body, message, _CONDITION)
        else:
            for node in returns:
                kind = scope.value(node.value).kind if node.value is not None else "none"
                if kind not in ("", "register"):
                    message = f"{body.name} returns a {kind} as the condition of nl.while_loop"
                    yield scope.report(Kind.REJECTED, "while-loop-body", node, message, _CONDITION)
        yield from _parameters(scope, body, loop)


def _parameters(scope: Scope, body: Function, loop: str) -> Iterator[Finding]:
    """Yield what is wrong with the number of parameters of a body."""
    args = body.args
    required = len(args.posonlyargs) + len(args.args) - len(args.defaults)
    most = len(args.posonlyargs) + len(args.args)
    if required > 1 or (most < 1 and args.vararg is None):
        message = f"{body.name} takes {required} arguments; nl.{loop} gives one"
        use = f"def {body.name}(i)" if loop == "fori_loop" else f"def {body.name}(register)"
        yield scope.report(Kind.REJECTED, f"{loop.replace('_', '-')}-body", body, message, use)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def steps(scope: Scope) -> Iterator[Finding]:
    """Dynamic loops count up by a compile-time step."""
    for name, node in scope.calls:
        position = {"nki.language.fori_loop": 3, DYNAMIC_RANGE: 2}.get(name)
        if position is None:
            continue
        given = node.args[position : position + 1]
        given += [item.value for item in node.keywords if item.arg == "step"]
        for step in given:
            value = literal_int(step)
            register = scope.value(step).kind == "register"
            if register or (value is not None and value < 1):
                message = f"nl.{name.rpartition('.')[2]} step {ast.unparse(step)}"
                use = "a positive compile-time integer; the loop only counts up"
                yield scope.report(Kind.REJECTED, "fori-loop-step", step, message, use)


def bounds(scope: Scope) -> Iterator[Finding]:
    """Bounds are integers or registers, conditions registers."""
    for name, call in scope.calls:
        loop = name.rpartition(".")[2]
        allowed = _REGISTERS
        if loop == "while_loop":
            given = call.args[:1] + [item.value for item in call.keywords if item.arg == "init"]
            what, use = "condition", "nisa.register_alloc(1)"
        elif name in DYNAMIC_LOOPS or name == DYNAMIC_RANGE:
            given = call.args[:2]
            given += [item.value for item in call.keywords if item.arg in _BOUNDS]
            allowed, what, use = (*_REGISTERS, "int"), "bound", _LOADED
        else:
            continue
        for value in given:
            kind = scope.value(value).kind
            if kind not in allowed and kind != "nki":
                message = f"{ast.unparse(value)} ({kind}) as a {what} of nl.{loop}"
                yield scope.report(Kind.REJECTED, "loop-bound", value, message, use)


def outliving_tensors(scope: Scope) -> Iterator[Finding]:
    """A tensor that the body of a dynamic loop allocates does not exist after the loop."""
    for loop in scope.of(ast.For):
        if scope.module.called(loop.iter) != DYNAMIC_RANGE:
            continue
        inside = set(ast.walk(loop))
        for name, values in scope.module.bindings.bound[scope.module.scope_of(loop)].items():
            if not all(isinstance(item, ast.AST) and item in inside for item in values):
                continue
            for node in scope.of(ast.Name):
                later = node.id == name and node not in inside and node.lineno > loop.lineno
                if later and scope.value(node).kind == "tensor":
                    message = f"{name} is allocated in the body of a dynamic loop that has ended"
                    use = "nl.ndarray before the loop"
                    yield scope.report(Kind.REJECTED, "loop-tensor", node, message, use)
                    break


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
                yield scope.report(Kind.REJECTED, "nested-dynamic-loop", loop, message, use)


def _regions(scope: Scope, loop: ast.AST) -> list[ast.AST]:
    """Return the code that a dynamic loop repeats."""
    if not isinstance(loop, ast.Call):
        return [loop]
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
    if isinstance(region, ast.While) and isinstance(region.test, ast.Name):
        written.discard(region.test.id)  # the loop's own condition
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
    outliving_tensors,
    carried_registers,
)
