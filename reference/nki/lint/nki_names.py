"""Which NKI name an expression stands for, through imports, aliases and conventions."""

import ast

from .. import changes as tables
from . import signatures
from .bindings import Bindings, Imported, Scope

# The names under which kernels know the NKI modules, whatever file re-exports them.
CONVENTIONAL = {
    "nki": "nki",
    "nl": "nki.language",
    "nisa": "nki.isa",
    "ncc": "nki.collectives",
}
MODULES = frozenset(CONVENTIONAL.values())
LEGACY_ROOT = "neuronxcc"
_DROPPED_ROOT = "jax_neuronx"
# What a package that wraps NKI as its own `nki` is taken to re-export.
_CHILDREN = frozenset(
    ("isa", "language", "collectives", "jit", "simulate", "tensor", "meta", "typing", "compiler")
    + ("benchmark", "profile", "baremetal", "simulate_kernel")
)


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for a chain of plain names, else ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


class NkiNames:
    """The NKI names of a file."""

    def __init__(self, bindings: Bindings) -> None:
        self.bindings = bindings
        self._known: dict[tuple[Scope, str], str] = {}
        self._names: dict[ast.AST, str] = {}
        self._stars = [name for name in map(_nki_path, bindings.star_imports) if name]

    def name(self, node: ast.AST) -> str:
        """Return the full NKI name of an expression (`nki.isa.dma_copy`), else ""."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return ""
        if node not in self._names:
            scope = self.bindings.scope_of.get(node, self.bindings.tree)
            target = self._target(node, scope) or self._spelt_out(node, scope)
            nameless = target in MODULES or target in (LEGACY_ROOT, _DROPPED_ROOT)
            self._names[node] = "" if nameless else target
        return self._names[node]

    def _spelt_out(self, node: ast.AST, scope: Scope) -> str:
        """Return the NKI name of `package.nki.isa.x`, if `import package.nki.isa` binds it."""
        path = dotted(node)
        found = self.bindings.find(path.partition(".")[0], scope) if ".nki" in path else None
        plain = found is not None and any(
            isinstance(item, Imported) and item.plain for item in found[1]
        )
        return _nki_path(path) if plain else ""

    def is_legacy(self, node: ast.Name) -> bool:
        """Whether a name comes from `neuronxcc.nki`."""
        found = self.bindings.find(node.id, self.bindings.scope_of[node])
        for item in found[1] if found else ():
            path = item.module.split(".") if isinstance(item, Imported) else [""]
            if isinstance(item, Imported) and path[0] == LEGACY_ROOT:
                return "nki" in (*path, item.name)
        return False

    def _target(self, node: ast.AST, scope: Scope) -> str:
        if isinstance(node, ast.Attribute):
            base = self._target(node.value, scope)
            if base == LEGACY_ROOT:
                return "nki" if node.attr == "nki" else ""
            return f"{base}.{node.attr}" if base else ""
        return self._bound_to(node.id, scope) if isinstance(node, ast.Name) else ""

    def _bound_to(self, name: str, scope: Scope) -> str:
        """Return the NKI name that a plain name is bound to."""
        key = scope, name
        if key not in self._known:
            self._known[key] = ""  # a name that is defined by itself means nothing
            self._known[key] = self._look_up(name, scope)
        return self._known[key]

    def _look_up(self, name: str, scope: Scope) -> str:
        found = self.bindings.find(name, scope)
        if found is None:
            for star in self._stars:
                full = f"{star}.{name}"
                if name in signatures.names(star) or full in tables.REMOVED:
                    return full
            return ""
        where, values = found
        imported = ""
        assigned = []
        for value in values:
            if isinstance(value, Imported):
                imported = _import_target(value) or imported
            elif not (isinstance(value, ast.Constant) and value.value is None):
                node = value if isinstance(value, ast.Name | ast.Attribute) else None
                assigned.append("" if node is None else self._target(node, where))
        if not imported and assigned and all(assigned):
            imported = assigned[-1]
        return imported


def _import_target(item: Imported) -> str:
    """Return the NKI name that an import binds, else ""."""
    if not item.name:
        if item.module.split(".")[0] in (LEGACY_ROOT, _DROPPED_ROOT) and item.plain:
            return item.module
        return _nki_path(item.module)
    return _nki_path(f"{item.module}.{item.name}") or CONVENTIONAL.get(item.name, "")


def _nki_path(path: str) -> str:
    """Return `nki...` for the path of NKI, of the old neuronxcc.nki or of a package's own nki."""
    parts = path.strip(".").split(".")
    if parts[0] == _DROPPED_ROOT:
        return ".".join(parts)
    if "nki" not in parts:
        return LEGACY_ROOT if parts == [LEGACY_ROOT] else ""
    position = parts.index("nki")
    rest = parts[position + 1 :]
    known = parts[:position] in ([], [LEGACY_ROOT]) and not path.startswith(".")
    return ".".join(["nki", *rest]) if known or not rest or rest[0] in _CHILDREN else ""
