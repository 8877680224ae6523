"""One parsed source file: its names, and which of its functions are kernel code."""

import ast
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property

from .bindings import FUNCTION_TYPES, Bindings, Function, Imported, Scope
from .nki_names import NkiNames, dotted

_DEVICE_CALLS = ("nki.isa.", "nki.language.", "nki.collectives.")


class Module:
    """A source file with what its names mean."""

    def __init__(self, path: str, source: str | bytes) -> None:
        """Parse `source`; raises SyntaxError if it is not Python."""
        self.path = path
        self.tree = ast.parse(source, path)
        self.bindings = Bindings(self.tree)
        self.parents = self.bindings.parents
        self._names = NkiNames(self.bindings)
        self.functions: dict[str, Function] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        for name, values in self.bindings.bound[self.tree].items():
            for value in values:
                if isinstance(value, FUNCTION_TYPES):
                    self.functions[name] = value
                elif isinstance(value, ast.ClassDef):
                    self.classes[name] = value

    def dotted(self, node: ast.AST) -> str:
        """Return `a.b.c` for a chain of plain names, else ""."""
        return dotted(node)

    def nki_name(self, node: ast.AST) -> str:
        """Return the full NKI name of an expression (`nki.isa.dma_copy`), else ""."""
        return self._names.name(node)

    def is_legacy(self, node: ast.Name) -> bool:
        """Whether a name comes from `neuronxcc.nki`."""
        return self._names.is_legacy(node)

    def called(self, node: ast.AST) -> str:
        """Return the full NKI name of the function that a call node calls, else ""."""
        return self.nki_name(node.func) if isinstance(node, ast.Call) else ""

    def scope_of(self, node: ast.AST) -> Scope:
        """Return the module, class or function whose names a node sees."""
        return self.bindings.scope_of[node]

    def imported(self, name: str, scope: Scope) -> Imported | None:
        """Return the import that a name comes from, None if it is bound otherwise."""
        found = self.bindings.find(name, scope)
        values = found[1] if found else []
        return next((item for item in values if isinstance(item, Imported)), None)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class of the file that a name means."""
        if not isinstance(node, ast.Name):
            return None
        for item in self.bindings.definitions(node.id, self.scope_of(node)):
            if isinstance(item, ast.ClassDef):
                return item
        return None

    @cached_property
    def kernels(self) -> frozenset[Function]:
        """The functions, at any depth, that `nki.jit` wraps as a decorator or in a call."""
        wrapped: set[str] = set()
        functions = []
        for node in self.bindings.scope_of:
            if isinstance(node, FUNCTION_TYPES):
                functions.append(node)
            elif isinstance(node, ast.Call) and self.wraps_as_kernel(node):
                wrapped |= {arg.id for arg in node.args if isinstance(arg, ast.Name)}
        return frozenset(
            node for node in functions if node.name in wrapped or self._is_decorated(node)
        )

    def _is_decorated(self, node: Function) -> bool:
        return any(
            self.nki_name(item) == "nki.jit"
            or (isinstance(item, ast.Call) and self.wraps_as_kernel(item))
            for item in node.decorator_list
        )

    def wraps_as_kernel(self, call: ast.Call) -> bool:
        """Whether a call is of nki.jit, of nki.simulate or of partial(nki.jit, ...)."""
        if self.nki_name(call.func) in ("nki.jit", "nki.simulate"):
            return True
        if isinstance(call.func, ast.Call):
            return self.wraps_as_kernel(call.func)
        partial = dotted(call.func).split(".")[-1] == "partial"
        return partial and bool(call.args) and self.nki_name(call.args[0]) == "nki.jit"

    @cached_property
    def device_functions(self) -> list[Function]:
        """All functions that are kernel code, in source order.

        These are the kernels, the functions and methods that call an NKI function themselves, the
        methods of NKIObject classes, and everything in this file that those reach by name.
        """
        queue = list(self.kernels)
        for node, scope in self.bindings.scope_of.items():
            if not isinstance(scope, FUNCTION_TYPES) or not isinstance(node, ast.Call):
                continue
            method = isinstance(self.bindings.outer(scope), ast.ClassDef)
            if not method and self.called(node).startswith(_DEVICE_CALLS):
                queue.append(scope)
        for cls in self.classes.values():
            if any(dotted(base).split(".")[-1] == "NKIObject" for base in cls.bases):
                queue += self.methods(cls)
        return self.reach(queue)

    def reach(self, roots: Iterable[Function]) -> list[Function]:
        """Return the functions of this file that some of it reach by name, with themselves."""
        queue = list(roots)
        found: set[Function] = set()
        while queue:
            function = queue.pop()
            if function in found:
                continue
            found.add(function)
            for child in self.code_nodes(function):
                if isinstance(child, ast.Name):
                    reached = self._reached(child, set())
                    queue += [item for item in reached if not self._encloses(function, item)]
        outermost = [
            item for item in found if item in self.kernels or not self._inside(item, found)
        ]
        return sorted(outermost, key=lambda node: node.lineno)

    def _inside(self, function: Function, others: set[Function]) -> bool:
        """Whether a function belongs to the code of another one."""
        scope = self.bindings.outer(function)
        while scope is not None and scope not in others:
            scope = self.bindings.outer(scope)
        return scope is not None

    def methods(self, cls: ast.ClassDef) -> list[Function]:
        """Return the methods of a class."""
        return [node for node in cls.body if isinstance(node, FUNCTION_TYPES)]

    def _reached(self, name: ast.Name, seen: set[str]) -> list[Function]:
        """Return the functions that a name leads to.

        That is the function or the methods of the class of that name, those that a container, an
        alias or a functools.partial of that name holds, and the class of an object of that name.
        """
        found = self.bindings.find(name.id, self.scope_of(name))
        if found is None or name.id in seen:
            return []
        seen.add(name.id)
        functions: list[Function] = []
        for value in found[1]:
            if isinstance(value, FUNCTION_TYPES):
                functions.append(value)
            elif isinstance(value, ast.ClassDef):
                functions += self.methods(value)
            elif isinstance(value, ast.expr):
                for held in self._held(value):
                    functions += self._reached(held, seen)
        return functions

    def _encloses(self, function: Function, inner: Function) -> bool:
        """Whether a function is defined in another, whose code it then belongs to."""
        scope: Scope | None = inner
        while scope is not None and scope is not function:
            scope = self.bindings.outer(scope)
        return scope is function and inner is not function

    def _held(self, value: ast.expr) -> Iterator[ast.Name]:
        """Yield the names whose functions a value holds."""
        if isinstance(value, ast.Name):
            if value in self.bindings.scope_of:
                yield value
            return
        inner: list[ast.expr] = []
        if isinstance(value, ast.Tuple | ast.List | ast.Set):
            inner = value.elts
        elif isinstance(value, ast.Dict):
            inner = value.values
        elif isinstance(value, ast.IfExp):
            inner = [value.body, value.orelse]
        elif isinstance(value, ast.Call):
            if dotted(value.func).split(".")[-1] == "partial":
                inner = [*value.args, *(item.value for item in value.keywords)]
            elif self.class_of(value.func) is not None:
                inner = [value.func]
        for item in inner:
            yield from self._held(item)

    def code_nodes(self, function: Function) -> Iterator[ast.AST]:
        """Walk what runs in a function: body and defaults, not annotations or decorators.

        A kernel defined inside (a factory, a test) is a function of its own.
        """
        queue: deque[ast.AST] = deque(function.args.defaults)
        queue += [default for default in function.args.kw_defaults if default is not None]
        queue += function.body
        while queue:
            node = queue.popleft()
            if node in self.kernels:
                continue
            yield node
            for field in node._fields:
                value = getattr(node, field, None)
                if field in ("annotation", "returns", "decorator_list"):
                    continue
                if isinstance(value, list):
                    queue += [child for child in value if isinstance(child, ast.AST)]
                elif isinstance(value, ast.AST):
                    queue.append(value)
