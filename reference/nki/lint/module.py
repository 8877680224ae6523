"""One parsed source file: its NKI names, and which of its functions are kernel code."""

import ast
from collections import deque
from collections.abc import Iterator
from functools import cached_property

# The names under which kernels know the NKI modules, whatever file re-exports them.
CONVENTIONAL = {
    "nki": "nki",
    "nl": "nki.language",
    "nisa": "nki.isa",
    "ncc": "nki.collectives",
}
LEGACY_ROOT = "neuronxcc.nki"
_DEVICE_CALLS = ("nki.isa.", "nki.language.", "nki.collectives.")
_DYNAMIC_LOOPS = ("nki.language.fori_loop", "nki.language.while_loop")

FUNCTION_TYPES = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """A source file with what its names mean.

    `aliases` maps local names to dotted NKI names (`nl` to `nki.language`), with the old
    `neuronxcc.nki` mapped to `nki`; `legacy` holds the local names that came from there.
    """

    def __init__(self, path: str, source: str) -> None:
        """Parse `source`; raises SyntaxError if it is not Python."""
        self.path = path
        self.tree = ast.parse(source, path)
        self.aliases: dict[str, str] = {}
        self.legacy: set[str] = set()
        self.plain_imports: set[str] = set()
        self.functions: dict[str, Function] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.parents: dict[ast.AST, ast.AST] = {}
        for parent in ast.walk(self.tree):
            for child in ast.iter_child_nodes(parent):
                self.parents[child] = parent
            if isinstance(parent, ast.Import):
                self._import(parent)
            elif isinstance(parent, ast.ImportFrom):
                self._import_from(parent)
        for node in self.tree.body:
            if isinstance(node, FUNCTION_TYPES):
                self.functions[node.name] = node
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            local = alias.asname or alias.name.split(".")[0]
            target = alias.name if alias.asname else local
            if alias.asname is None:
                self.plain_imports.add(local)
            self._bind(local, target, legacy=alias.name.startswith(LEGACY_ROOT))

    def _import_from(self, node: ast.ImportFrom) -> None:
        source = "." * node.level + (node.module or "")
        for alias in node.names:
            local = alias.asname or alias.name
            target = f"{source}.{alias.name}"
            if not _is_nki(target):
                target = CONVENTIONAL.get(alias.name, "")
            self._bind(local, target, legacy=source.startswith("neuronxcc"))

    def _bind(self, local: str, target: str, *, legacy: bool) -> None:
        if not _is_nki(target):
            return
        if legacy:
            self.legacy.add(local)
        if target.startswith(LEGACY_ROOT):
            target = target.removeprefix("neuronxcc.")
        self.aliases[local] = target

    def dotted(self, node: ast.AST) -> str:
        """Return `a.b.c` for a chain of plain names, else ""."""
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def nki_name(self, node: ast.AST) -> str:
        """Return the full NKI name of an expression (`nki.isa.dma_copy`), else ""."""
        dotted = self.dotted(node)
        if not dotted:
            return ""
        head, _, rest = dotted.partition(".")
        target = self.aliases.get(head, "")
        if target == "neuronxcc":
            return dotted.removeprefix("neuronxcc.") if dotted.startswith(LEGACY_ROOT) else ""
        if not target or not rest:
            return target if target not in CONVENTIONAL.values() else ""
        return f"{target}.{rest}"

    def called(self, node: ast.AST) -> str:
        """Return the full NKI name of the function that a call node calls, else ""."""
        return self.nki_name(node.func) if isinstance(node, ast.Call) else ""

    @cached_property
    def kernels(self) -> frozenset[Function]:
        """The functions, at any depth, that `nki.jit` wraps as a decorator or in a call."""
        wrapped: set[str] = set()
        functions = []
        for node in ast.walk(self.tree):
            if isinstance(node, FUNCTION_TYPES):
                functions.append(node)
            elif isinstance(node, ast.Call) and self.called(node) == "nki.jit":
                wrapped |= {arg.id for arg in node.args if isinstance(arg, ast.Name)}
        return frozenset(
            node for node in functions if node.name in wrapped or self._is_decorated(node)
        )

    def _is_decorated(self, node: Function) -> bool:
        return any(
            self.nki_name(item.func if isinstance(item, ast.Call) else item) == "nki.jit"
            for item in node.decorator_list
        )

    @cached_property
    def device_functions(self) -> list[Function]:
        """All functions that are kernel code, in source order.

        These are the kernels, the functions and methods that call an NKI function, the methods
        of NKIObject classes, and everything in this file that those reach by name.
        """
        queue = list(self.kernels)
        for node in self.functions.values():
            calls = (self.called(child) for child in self.code_nodes(node))
            if any(name.startswith(_DEVICE_CALLS) for name in calls):
                queue.append(node)
        for cls in self.classes.values():
            if any(self.dotted(base).split(".")[-1] == "NKIObject" for base in cls.bases):
                queue += self.methods(cls)
        found: set[Function] = set()
        while queue:
            function = queue.pop()
            if function in found:
                continue
            found.add(function)
            for child in self.code_nodes(function):
                if isinstance(child, ast.Name):
                    queue += self.named(child.id)
        return sorted(found, key=lambda node: node.lineno)

    def methods(self, cls: ast.ClassDef) -> list[Function]:
        """Return the methods of a class."""
        return [node for node in cls.body if isinstance(node, FUNCTION_TYPES)]

    def named(self, name: str) -> list[Function]:
        """Return the function of the file with a name, or the methods of the class with it."""
        if name in self.functions:
            return [self.functions[name]]
        return self.methods(self.classes[name]) if name in self.classes else []

    def loop_bodies(self, function: Function) -> dict[str, str]:
        """Return the local functions given to a dynamic loop: name to the loop's name."""
        bodies = {}
        for node in ast.walk(function):
            name = self.called(node)
            if name in _DYNAMIC_LOOPS and isinstance(node, ast.Call):
                position = 2 if name.endswith("fori_loop") else 1
                arguments = node.args[position : position + 1]
                arguments += [item.value for item in node.keywords if item.arg == "body_fun"]
                for argument in arguments:
                    if isinstance(argument, ast.Name):
                        bodies[argument.id] = name.rsplit(".", 1)[1]
        return bodies

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
            for field, value in ast.iter_fields(node):
                if field in ("annotation", "returns", "decorator_list"):
                    continue
                children = value if isinstance(value, list) else [value]
                queue += [child for child in children if isinstance(child, ast.AST)]


def _is_nki(target: str) -> bool:
    return target == "nki" or target.startswith(("nki.", LEGACY_ROOT)) or target == "neuronxcc"
