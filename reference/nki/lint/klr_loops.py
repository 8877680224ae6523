"""Level 2: loops as the open KLR front end takes them.

Source of all klr_ modules: reading of leanprover/KLR as of March 2026. The compiler that ships may
differ, so all of this warns. Constructs that level 1 reports already are left out.
"""

import ast
from collections.abc import Iterator

from .bindings import FUNCTION_TYPES
from .finding import Finding
from .loop_rules import DYNAMIC_RANGE, dynamic_loops
from .scope import Rule, Scope, literal_int

_NOT_ITERABLE = {
    "dict": "d.keys() or d.items()",
    "str": "a list of strings",
    "tensor": "range over a dimension, and slices",
    "object": "a list that the object holds",
    "class": "a list of the members",
    "set": "a list",
    "none": "a list",
    "register": "nl.fori_loop",
}
_RANGES = ("static_range", "affine_range", "sequential_range", "dynamic_range")
_GROWING = ("append", "extend", "pop", "remove", "clear", "reverse", "setdefault")


def headers(scope: Scope) -> Iterator[Finding]:
    """For targets, else clauses and iterables."""
    for node in scope.nodes:
        if isinstance(node, ast.For | ast.While) and node.orelse:
            yield scope.warn("loop-else", node, "else clause of a loop is rejected", "a flag")
        if not isinstance(node, ast.For):
            continue
        if not isinstance(node.target, ast.Name):
            use = "one loop variable and an unpacking statement in the body"
            yield scope.warn("loop-target", node, "only one plain loop variable is taken", use)
        kind = scope.value(node.iter).kind
        if kind in _NOT_ITERABLE:
            message = f"{ast.unparse(node.iter)} ({kind}) cannot be iterated over"
            yield scope.warn("loop-iterable", node.iter, message, _NOT_ITERABLE[kind])


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
                yield scope.warn("hoisted-header", child, message, use)


def ranges(scope: Scope) -> Iterator[Finding]:
    """A range stands in the header of a for loop, with 1 to 3 positional arguments."""
    for node in scope.of(ast.Call):
        name = _range_name(scope, node)
        if not name:
            continue
        parent = scope.parent(node)
        if not (isinstance(parent, ast.For | ast.comprehension) and parent.iter is node):
            message = f"{name} has no value outside the header of a for loop"
            yield scope.warn("range", node, message, f"a loop over {name} directly")
        elif node.keywords:
            message = f"{name} with keywords is rejected"
            yield scope.warn("range", node, message, "positional arguments")
        elif not 1 <= len(node.args) <= 3:
            yield scope.warn("range", node, f"{name} takes 1 to 3 arguments", "start, stop, step")
        elif len(node.args) == 3 and literal_int(node.args[2]) == 0:
            yield scope.warn("range", node, f"{name} with step 0 is silently empty", "a step >= 1")


def _range_name(scope: Scope, node: ast.Call) -> str:
    """Return range, or the nl. range that a call means, else ""."""
    name = scope.module.called(node).removeprefix("nki.language.")
    if name in _RANGES:
        return f"nl.{name}"
    plain = isinstance(node.func, ast.Name) and node.func.id == "range"
    return "range" if plain and scope.is_builtin("range", node) else ""


def conditions(scope: Scope) -> Iterator[Finding]:
    """The condition of a static while is evaluated once more at entry."""
    for node in scope.of(ast.While):
        for child in ast.walk(node.test):
            method = child.func if isinstance(child, ast.Call) else None
            if isinstance(method, ast.Attribute) and method.attr in _GROWING:
                message = f"{ast.unparse(child)} in the condition runs once more at entry"
                use = "a variable that the body updates"
                yield scope.warn("while-condition", child, message, use)


def dynamic_exits(scope: Scope) -> Iterator[Finding]:
    """The body of a dynamic loop has no break, continue or return."""
    for loop in scope.of(ast.For):
        if scope.module.called(loop.iter) != DYNAMIC_RANGE:
            continue
        for node in _body_nodes(loop):
            if isinstance(node, ast.Break | ast.Continue | ast.Return):
                word = type(node).__name__.lower()
                message = f"{word} in a dynamic loop is rejected"
                yield scope.warn("dynamic-exit", node, message, "nl.while_loop with a condition")


def _body_nodes(loop: ast.For) -> Iterator[ast.AST]:
    """Yield what belongs to a loop's body, without breaks of static loops inside."""
    stack: list[tuple[ast.AST, bool]] = [(node, True) for node in loop.body]
    while stack:
        node, own = stack.pop()
        if own or not isinstance(node, ast.Break | ast.Continue):
            yield node
        if not isinstance(node, FUNCTION_TYPES):
            inner = own and not isinstance(node, ast.For | ast.While)
            stack += [(child, inner) for child in ast.iter_child_nodes(node)]


def carried_values(scope: Scope) -> Iterator[Finding]:
    """Python values do not change from one trip of a dynamic loop to the next."""
    use = "a [1, 1] tile in SBUF that the body updates"
    for loop in scope.of(ast.For):
        if scope.module.called(loop.iter) != DYNAMIC_RANGE:
            continue
        for node in ast.walk(loop):
            target = node.target if isinstance(node, ast.AugAssign) else None
            kind = scope.value(target).kind if isinstance(target, ast.Name) else ""
            if target is not None and kind in ("int", "float", "list", "str"):
                message = f"{ast.unparse(target)} changes once, not in every trip"
                yield scope.warn("carried-value", node, message, use)
    for body in scope.bodies:
        for node in ast.walk(body):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = node.func.value
            if node.func.attr in _GROWING and isinstance(owner, ast.Name):
                found = scope.module.bindings.find(owner.id, scope.module.scope_of(owner))
                outside = found is not None and found[0] is not body
                if outside and scope.value(owner).kind in ("list", "dict"):
                    message = f"{owner.id} changes once, not in every trip"
                    yield scope.warn("carried-value", node, message, use)


def nested_dynamic_loops(scope: Scope) -> Iterator[Finding]:
    """A dynamic loop in a dynamic loop fails when values are carried (known issue, 0.4.0)."""
    for outer in dynamic_loops(scope, scope.function):
        if isinstance(outer, ast.Call):
            continue
        for inner in dynamic_loops(scope, outer):
            if inner is not outer:
                message = "nested dynamic loops with carried values do not compile"
                yield scope.warn("nested-dynamic-loop", inner, message, "range for the outer loop")


RULES: tuple[Rule, ...] = (
    headers,
    hoisted_headers,
    ranges,
    conditions,
    dynamic_exits,
    carried_values,
    nested_dynamic_loops,
)
