"""Level 2: statements that the open KLR front end rejects or evaluates differently.

Source: reading of leanprover/KLR as of March 2026. The compiler that ships may differ, so all of
this warns. Constructs that level 1 reports already are left out.
"""

import ast
from collections.abc import Iterator

from .finding import Finding, Kind
from .scope import Rule, Scope, literal_int

_DECORATORS = ("staticmethod", "dataclass")


def _warn(scope: Scope, rule: str, node: ast.AST, message: str, use: str = "") -> Finding:
    return scope.report(Kind.FRONT_END, rule, node, message, use)


def loops(scope: Scope) -> Iterator[Finding]:
    """For targets, else clauses and iterables."""
    for node in scope.nodes:
        if isinstance(node, ast.For | ast.While) and node.orelse:
            yield _warn(scope, "loop-else", node, "else clause of a loop is rejected", "a flag")
        if isinstance(node, ast.For) and not isinstance(node.target, ast.Name):
            use = "one loop variable and an unpacking statement in the body"
            yield _warn(scope, "loop-target", node, "only one plain loop variable is taken", use)


def hoisted_headers(scope: Scope) -> Iterator[Finding]:
    """Attributes of calls and subscripts in headers are bound only inside the body."""
    for node in scope.nodes:
        if not isinstance(node, ast.If | ast.While | ast.For):
            continue
        header = node.iter if isinstance(node, ast.For) else node.test
        for child in ast.walk(header):
            if isinstance(child, ast.Attribute) and isinstance(
                child.value, ast.Call | ast.Subscript
            ):
                message = f"{ast.unparse(child)} in the header of a statement has no value there"
                use = "a variable assigned before the statement"
                yield _warn(scope, "hoisted-header", child, message, use)


def targets(scope: Scope) -> Iterator[Finding]:
    """Assignment targets beyond plain names, flat tuples and one element."""
    for node in scope.of(ast.Assign):
        stores = 0
        for target in node.targets:
            stores += isinstance(target, ast.Attribute | ast.Subscript)
            yield from _target(scope, target)
        if stores > 1:
            message = "two stores in one statement are rejected"
            yield _warn(scope, "assign-target", node, message, "one statement per store")


def _target(scope: Scope, target: ast.expr) -> Iterator[Finding]:
    plain = "one statement per target"
    if isinstance(target, ast.List):
        yield _warn(scope, "assign-target", target, "a list as a target is rejected", "a tuple")
    elif isinstance(target, ast.Tuple):
        for item in target.elts:
            if isinstance(item, ast.Tuple | ast.List):
                message = "nested unpacking is rejected"
                yield _warn(scope, "assign-target", item, message, "flat unpacking, twice")
            elif isinstance(item, ast.Starred):
                yield _warn(scope, "star", item, "star in a target is rejected", "slices")
            elif not isinstance(item, ast.Name):
                message = "only plain names can be unpacked into"
                yield _warn(scope, "assign-target", item, message, plain)
    elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Attribute):
        message = f"{ast.unparse(target)}: the object of a store must be a plain variable"
        use = f"t = {ast.unparse(target.value)}, then t.{target.attr} = ..."
        yield _warn(scope, "assign-target", target, message, use)
    elif isinstance(target, ast.Subscript) and (literal_int(target.slice) or 0) < 0:
        message = "negative index in a store is rejected"
        yield _warn(scope, "negative-store", target, message, "a non-negative index")


def isa_results(scope: Scope) -> Iterator[Finding]:
    """`x = nisa.f(...)` is rewritten to a call with x as the destination."""
    for node in scope.of(ast.Assign):
        name = scope.module.called(node.value)
        if name.startswith("nki.isa.") and name != "nki.isa.register_alloc":
            message = f"the result of {name.removeprefix('nki.')} is taken as its destination"
            yield _warn(scope, "isa-result", node, message, "the call as a bare statement")


def nested_functions(scope: Scope) -> Iterator[Finding]:
    """Local functions are rejected; the bodies of dynamic loops need them (0.6.0)."""
    bodies = scope.bodies
    for node in scope.of(ast.FunctionDef):
        if node in bodies:
            message = f"{node.name} is the local body of nl.{bodies[node]}"
            yield scope.report(Kind.INFORMATION, "loop-body", node, message)
        else:
            message = f"local function {node.name} is rejected"
            yield _warn(scope, "nested-function", node, message, "a function of the file")
    for name, call in scope.calls:
        if name in ("nki.language.fori_loop", "nki.language.while_loop"):
            message = f"nl.{name.rpartition('.')[2]} (0.6.0) is newer than the open front end"
            yield scope.report(Kind.INFORMATION, "dynamic-loop", call, message)


def signature(scope: Scope) -> Iterator[Finding]:
    """Decorators, star parameters and defaults of the function itself."""
    function = scope.function
    for decorator in function.decorator_list:
        callee = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = scope.module.dotted(callee).split(".")[-1]
        if scope.module.nki_name(callee) != "nki.jit" and name not in _DECORATORS:
            message = f"decorator {ast.unparse(callee)} is rejected"
            yield _warn(scope, "decorator", decorator, message, "no decorator on helpers")
    if function.args.vararg is not None:
        message = f"*{function.args.vararg.arg} is rejected"
        yield _warn(scope, "star", function.args.vararg, message, "a tuple parameter")
    if function.args.kwarg is not None:
        message = f"**{function.args.kwarg.arg} must stay empty and is not bound"
        yield _warn(scope, "star", function.args.kwarg, message, "named parameters")
    for default in [*function.args.defaults, *function.args.kw_defaults]:
        if isinstance(default, ast.List | ast.Dict):
            message = "a default is evaluated at each call, not once"
            yield _warn(scope, "mutable-default", default, message, "None and a new value inside")


def in_place_lists(scope: Scope) -> Iterator[Finding]:
    """`l += [x]` makes a new list instead of extending the caller's."""
    for node in scope.of(ast.AugAssign):
        if not isinstance(node.op, ast.Add) or not isinstance(node.value, ast.List):
            continue
        shared = isinstance(node.target, ast.Attribute) or (
            isinstance(node.target, ast.Name) and node.target.id in scope.parameters
        )
        if shared:
            message = f"{ast.unparse(node.target)} += [...] makes a new list"
            yield _warn(scope, "list-append", node, message, "append or extend")


def ellipsis_body(scope: Scope) -> Iterator[Finding]:
    """`...` has a meaning only inside a subscript."""
    for node in scope.of(ast.Constant):
        if node.value is Ellipsis and not _in_subscript(scope, node):
            yield _warn(scope, "ellipsis", node, "... outside a subscript is rejected", "pass")


def _in_subscript(scope: Scope, node: ast.AST) -> bool:
    parent = scope.parent(node)
    if isinstance(parent, ast.Tuple):
        node, parent = parent, scope.parent(parent)
    return isinstance(parent, ast.Subscript) and parent.slice is node


def dataclass_fields(scope: Scope) -> Iterator[Finding]:
    """Every field is optional and a default_factory is not called."""
    for node in scope.of(ast.Name):
        cls = scope.module.classes.get(node.id)
        for statement in cls.body if cls is not None else ():
            value = getattr(statement, "value", None)
            if not isinstance(value, ast.Call):
                continue
            if any(item.arg == "default_factory" for item in value.keywords):
                message = f"default_factory in class {node.id} gives None"
                use = "a value set in __post_init__"
                yield _warn(scope, "default-factory", node, message, use)


def nested_dynamic_loops(scope: Scope) -> Iterator[Finding]:
    """A dynamic loop in a dynamic loop fails when values are carried (known issue, 0.4.0)."""
    for node in scope.of(ast.For):
        if scope.module.called(node.iter) != "nki.language.dynamic_range":
            continue
        for child in ast.walk(node):
            if child is node or not isinstance(child, ast.For):
                continue
            if scope.module.called(child.iter) == "nki.language.dynamic_range":
                message = "nested dynamic loops with carried values do not compile"
                use = "range for the outer loop"
                yield _warn(scope, "nested-dynamic-loop", child, message, use)


RULES: tuple[Rule, ...] = (
    loops,
    hoisted_headers,
    targets,
    isa_results,
    nested_functions,
    signature,
    in_place_lists,
    ellipsis_body,
    dataclass_fields,
    nested_dynamic_loops,
)
