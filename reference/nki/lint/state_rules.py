"""Kernels are pure functions of their arguments; state outside of them is undefined."""

import ast
from collections.abc import Iterator
from functools import lru_cache

from .bindings import Scope as Place
from .finding import Finding, Kind
from .module import Module
from .nki_names import dotted
from .scope import Rule, Scope

_USE = "an argument of the kernel, or a constant that nothing changes"
_CHANGING = (
    *("append", "extend", "insert", "pop", "remove", "clear", "reverse", "sort"),
    *("update", "setdefault", "popitem", "add", "discard"),
)
_CONTAINERS = ("list", "dict", "set")
_OF_THE_HOST = (
    *("time.", "datetime.", "random.", "numpy.random.", "secrets.", "uuid.", "os.getenv"),
    *("os.environ", "socket.", "subprocess."),
)
_HOST_BUILTINS = ("open", "input")


def external_state(scope: Scope) -> Iterator[Finding]:
    """Containers of the module (or of a function around the kernel) that change."""
    changed = _changed(scope.module)
    for node in scope.of(ast.Name):
        found = scope.module.bindings.find(node.id, scope.module.scope_of(node))
        if found is None or not isinstance(node.ctx, ast.Load) or not _around(scope, found[0]):
            continue
        container = scope.value(node).kind in _CONTAINERS
        parent = scope.parent(node)
        change = _change(parent, scope.parent(parent), node) if container else ""
        if change:
            message = f"{change} changes {node.id}, which lies outside of the kernel"
            yield scope.report(Kind.REFUSED, "external-state", node, message, _USE)
        elif (found[0], node.id) in changed and (container or _is_global(scope, node.id)):
            message = f"{node.id} lies outside of the kernel and functions of the file change it"
            yield scope.report(Kind.REFUSED, "external-state", node, message, _USE)


def _is_global(scope: Scope, name: str) -> bool:
    """Whether a function of the file declares a name global."""
    nodes = scope.module.bindings.scope_of
    return any(isinstance(node, ast.Global) and name in node.names for node in nodes)


def _around(scope: Scope, place: Place) -> bool:
    """Whether a scope encloses the function; other kernel code around it is no outside."""
    current: Place | None = scope.module.scope_of(scope.function)
    while current is not None:
        if current in scope.module.kernels:
            return False
        if current is place:
            return True
        current = scope.module.bindings.outer(current)
    return False


def _change(parent: ast.AST, grand: ast.AST, node: ast.AST) -> str:
    """Return the code that changes the container `node`, "" if it is only read."""
    if isinstance(parent, ast.Attribute) and isinstance(grand, ast.Call):
        changes = parent.attr in _CHANGING and grand.func is parent
        return ast.unparse(parent) if changes else ""
    if isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Store | ast.Del):
        return f"{ast.unparse(parent)} = ..." if parent.value is node else ""
    return ""


@lru_cache(maxsize=8)
def _changed(module: Module) -> frozenset[tuple[Place, str]]:
    """Return the names of the module that its functions change or assign to."""
    bindings = module.bindings
    found = set()
    for node, place in bindings.scope_of.items():
        if isinstance(node, ast.Global):
            found |= {(module.tree, name) for name in node.names}
        elif isinstance(node, ast.Name) and place is not module.tree:
            parent = bindings.parents[node]
            if _change(parent, bindings.parents.get(parent, parent), node):
                where = bindings.find(node.id, place)
                if where is not None and where[0] is module.tree:
                    found.add((module.tree, node.id))
    return frozenset(found)


def host_calls(scope: Scope) -> Iterator[Finding]:
    """Clocks, random numbers, the environment and files: read once, when it is compiled."""
    for node in scope.of(ast.Call):
        name = dotted(node.func)
        head, _, rest = name.partition(".")
        imported = scope.module.imported(head, scope.module.scope_of(node)) if head else None
        if imported is not None:
            full = ".".join(part for part in (imported.module, imported.name, rest) if part)
            impure = full.startswith(_OF_THE_HOST)
        else:
            impure = name in _HOST_BUILTINS and scope.is_builtin(name, node)
        if impure:
            message = f"{name}() runs when the kernel is compiled, not when it runs"
            yield scope.report(Kind.HOST, "host-call", node, message, "an argument of the kernel")


RULES: tuple[Rule, ...] = (external_state, host_calls)
