"""What the names of a file are bound to, scope by scope: imports, assignments, definitions."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

FUNCTION_TYPES = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.AST  # ast.Module, a function or a class


_BINDING = frozenset(
    (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    + (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.AugAssign, ast.For, ast.AsyncFor)
    + (ast.comprehension, ast.withitem, ast.ExceptHandler)
)


class Imported(NamedTuple):
    """`import module as x` (name "") or `from module import name as x`."""

    module: str  # with the leading dots of a relative import
    name: str
    plain: bool  # `import x` or `import x.y` without `as`


class Element(NamedTuple):
    """An element of `container`: a loop variable, or an unpacked name."""

    container: ast.expr


# An expression is the assigned value, None something that is not looked into.
Bound = Imported | Element | ast.expr | Function | ast.ClassDef | None


class Bindings:
    """The scopes of a file: `scope_of` every node, and what is bound there to a name."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.parents: dict[ast.AST, ast.AST] = {}
        self.scope_of: dict[ast.AST, Scope] = {}
        self.bound: dict[Scope, dict[str, list[Bound]]] = {tree: {}}
        self.star_imports: list[str] = []
        stack: list[tuple[ast.AST, Scope]] = [(tree, tree)]
        while stack:
            node, scope = stack.pop()
            self.scope_of[node] = scope
            if type(node) in _BINDING:
                self._visit(node, scope)
            children = list(self._children(node, scope))
            for child, _ in children:
                self.parents[child] = node
            stack += reversed(children)

    def _children(self, node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
        own = isinstance(node, FUNCTION_TYPES + (ast.ClassDef,))
        for field in node._fields:
            value = getattr(node, field, None)
            inner = node if own and field == "body" else scope
            if isinstance(value, list):
                for child in value:
                    if isinstance(child, ast.AST):
                        yield child, inner
            elif isinstance(value, ast.AST):
                yield value, inner

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        """Record what a node binds."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.split(".")[0]
                module = alias.name if alias.asname else local
                self._bind(scope, local, Imported(module, "", alias.asname is None))
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                if alias.name == "*":
                    self.star_imports.append(module)
                self._bind(scope, alias.asname or alias.name, Imported(module, alias.name, False))
        elif isinstance(node, FUNCTION_TYPES + (ast.ClassDef,)):
            self._bind(scope, node.name, node)
            self.bound[node] = {}
            if not isinstance(node, ast.ClassDef):
                self._parameters(node.args, node)
        elif isinstance(node, ast.Lambda):
            self._parameters(node.args, scope)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(scope, target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            if node.value is not None:
                self._assign(scope, node.target, node.value)
        elif isinstance(node, ast.AugAssign):
            if isinstance(node.target, ast.Name):
                left = ast.Name(node.target.id, ast.Load())
                self._bind(scope, node.target.id, ast.BinOp(left, node.op, node.value))
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._unpack(scope, node.target, node.iter)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._unpack(scope, node.optional_vars, None)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            self._bind(scope, node.name, None)

    def _bind(self, scope: Scope, name: str, value: Bound) -> None:
        self.bound[scope].setdefault(name, []).append(value)

    def _parameters(self, args: ast.arguments, scope: Scope) -> None:
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        for arg in every:
            if arg is not None:
                self._bind(scope, arg.arg, None)

    def _assign(self, scope: Scope, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._bind(scope, target.id, value)
        elif isinstance(target, ast.Tuple | ast.List):
            elements = getattr(value, "elts", None)
            paired = elements is not None and len(elements) == len(target.elts)
            if paired and not any(isinstance(item, ast.Starred) for item in target.elts):
                for item, element in zip(target.elts, elements or (), strict=True):
                    self._assign(scope, item, element)
            else:
                self._unpack_all(scope, target, value)

    def _unpack(self, scope: Scope, target: ast.expr, container: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            self._bind(scope, target.id, None if container is None else Element(container))
        else:
            self._unpack_all(scope, target, None)

    def _unpack_all(self, scope: Scope, target: ast.expr, container: ast.expr | None) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                flat = container if node in getattr(target, "elts", ()) else None
                self._bind(scope, node.id, None if flat is None else Element(flat))

    def outer(self, scope: Scope) -> Scope | None:
        """Return the scope around a scope, None for the module."""
        return None if scope is self.tree else self.scope_of[scope]

    def find(self, name: str, scope: Scope) -> tuple[Scope, list[Bound]] | None:
        """Return where a name that `scope` uses is bound, and to what; None if nowhere."""
        current: Scope | None = scope
        while current is not None:
            visible = current is scope or not isinstance(current, ast.ClassDef)
            if visible and name in self.bound[current]:
                return current, self.bound[current][name]
            current = self.outer(current)
        return None

    def definitions(self, name: str, scope: Scope) -> list[Function | ast.ClassDef]:
        """Return the functions and classes of the file that a name may mean."""
        found = self.find(name, scope)
        kinds = FUNCTION_TYPES + (ast.ClassDef,)
        return [item for item in (found[1] if found else ()) if isinstance(item, kinds)]
