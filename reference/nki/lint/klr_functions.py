"""Level 2: functions, decorators and calls of the ISA as the open KLR front end takes them."""

import ast
from collections.abc import Iterator

from .bindings import FUNCTION_TYPES
from .finding import Finding, Kind
from .loops import DYNAMIC_LOOPS
from .nki_names import dotted
from .scope import Rule, Scope

_DECORATORS = ("staticmethod", "dataclass")


def nested_functions(scope: Scope) -> Iterator[Finding]:
    """Local functions are rejected; the bodies of dynamic loops need them (0.6.0)."""
    for node in scope.of(ast.FunctionDef):
        if node in scope.bodies:
            message = f"{node.name} is the local body of nl.{scope.bodies[node]}"
            yield scope.report(Kind.INFORMATION, "loop-body", node, message)
        else:
            message = f"local function {node.name} is rejected"
            yield scope.warn("nested-function", node, message, "a function of the file")
    for name, call in scope.calls:
        if name in DYNAMIC_LOOPS:
            message = f"nl.{name.rpartition('.')[2]} (0.6.0) is newer than the open front end"
            yield scope.report(Kind.INFORMATION, "dynamic-loop", call, message)


def closures(scope: Scope) -> Iterator[Finding]:
    """Names of a function around the kernel are not found."""
    reported = set()
    inner = {scope.function, *scope.of(ast.FunctionDef)}
    for node in scope.of(ast.Name):
        found = scope.module.bindings.find(node.id, scope.module.scope_of(node))
        if found is None or node.id in reported or not isinstance(found[0], FUNCTION_TYPES):
            continue
        if found[0] not in inner and not scope.module.nki_name(node):
            reported.add(node.id)
            message = f"{node.id} of the function {found[0].name} around is not found"
            yield scope.warn("closure", node, message, "an argument, or a name of the file")


def signature(scope: Scope) -> Iterator[Finding]:
    """Decorators, star parameters and defaults of the function itself."""
    function = scope.function
    for decorator in function.decorator_list:
        callee = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = scope.module.nki_name(callee) or dotted(callee).split(".")[-1]
        if name != "nki.jit" and name not in _DECORATORS and not name.startswith("nki."):
            message = f"decorator {ast.unparse(callee)} is rejected"
            yield scope.warn("decorator", decorator, message, "no decorator on helpers")
    if function.args.vararg is not None:
        message = f"*{function.args.vararg.arg} is rejected"
        yield scope.warn("star", function.args.vararg, message, "a tuple parameter")
    if function.args.kwarg is not None:
        message = f"**{function.args.kwarg.arg} must stay empty and is not bound"
        yield scope.warn("star", function.args.kwarg, message, "named parameters")
    for default in [*function.args.defaults, *function.args.kw_defaults]:
        if isinstance(default, ast.List | ast.Dict):
            message = "a default is evaluated at each call, not once"
            yield scope.warn("mutable-default", default, message, "None and a new value inside")
        elif isinstance(default, ast.Name) and (caller := _caller_with(scope, default.id)):
            message = f"in calls from {caller}, the default {default.id} is {caller}'s own variable"
            yield scope.warn("default-scope", default, message, "another name")


def _caller_with(scope: Scope, name: str) -> str:
    """Return a function of the file that calls this one and has a local variable of a name."""
    for function in scope.module.device_functions:
        if name in scope.module.bindings.bound[function] and function is not scope.function:
            for node in scope.module.code_nodes(function):
                if isinstance(node, ast.Name) and node.id == scope.function.name:
                    return function.name
    return ""


def isa_results(scope: Scope) -> Iterator[Finding]:
    """`x = nisa.f(...)` is rewritten to a call with x as the destination."""
    for node in scope.nodes:
        if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            continue
        sides = [node.value]
        if isinstance(node.value, ast.BinOp):
            sides = [node.value.left, node.value.right]
        for side in sides:
            name = scope.module.called(side) if side is not None else ""
            if name.startswith("nki.isa.") and name != "nki.isa.register_alloc":
                message = f"the result of {name.removeprefix('nki.')} is taken as its destination"
                yield scope.warn("isa-result", node, message, "the call as a bare statement")


def results(scope: Scope) -> Iterator[Finding]:
    """A kernel's outputs are the tensors in the tuples and lists that it returns."""
    for node in scope.of(ast.Return) if scope.is_kernel else ():
        kind = scope.value(node.value).kind if node.value is not None else ""
        own = scope.module.scope_of(node) is scope.function
        if own and kind in ("dict", "object"):
            message = f"a kernel that returns a {kind} has no outputs"
            yield scope.warn("kernel-result", node, message, "a tuple of tensors")


def callables(scope: Scope) -> Iterator[Finding]:
    """Module-level lambdas and functools.partial have no source that is found."""
    for node in scope.of(ast.Name):
        found = scope.module.bindings.find(node.id, scope.module.scope_of(node))
        for value in found[1] if found is not None and isinstance(node.ctx, ast.Load) else ():
            if isinstance(value, ast.Lambda):
                message = f"{node.id} is a lambda, whose source is not found"
                yield scope.warn("callable", node, message, f"def {node.id}(...)")
            elif isinstance(value, ast.Call) and _is_partial(scope, value.func):
                message = f"{node.id} is a functools.partial, which is no function"
                yield scope.warn("callable", node, message, "a function that calls the other")
    for call in scope.of(ast.Call):
        if _is_partial(scope, call.func):
            message = "functools.partial makes an object that is no function"
            yield scope.warn("callable", call, message, "a function that calls the other")


def _is_partial(scope: Scope, callee: ast.expr) -> bool:
    name = dotted(callee)
    imported = scope.module.imported(name.partition(".")[0], scope.module.scope_of(callee))
    return name.split(".")[-1] == "partial" and (
        imported is not None and imported.module == "functools"
    )


RULES: tuple[Rule, ...] = (
    nested_functions,
    closures,
    signature,
    isa_results,
    results,
    callables,
)
