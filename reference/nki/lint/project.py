"""The files that a file imports from, as far as they lie beside it; nothing is executed."""

import ast
from contextlib import suppress
from pathlib import Path

from .bindings import Function, Imported, Scope
from .module import Module

Definition = tuple[Module, Function | ast.ClassDef]


class Project:
    """Modules by file, parsed once."""

    def __init__(self) -> None:
        self._modules: dict[Path, Module | None] = {}
        self._files: dict[tuple[Module, Imported], tuple[Module, str] | None] = {}

    def add(self, module: Module) -> None:
        """Let other files find a module that is parsed already."""
        self._modules[Path(module.path).resolve()] = module

    def _load(self, path: Path) -> Module | None:
        """Return the module of a file, None if it cannot be read or parsed."""
        path = path.resolve()
        if path not in self._modules:
            self._modules[path] = None
            # what is wrong with the file is reported where that file itself is linted
            with suppress(OSError, SyntaxError, ValueError, RecursionError):
                self._modules[path] = Module(str(path), path.read_bytes())
        return self._modules[path]

    def file(self, module: Module, imported: Imported) -> tuple[Module, str] | None:
        """Return the file that an import reads, and the name in it ("" for the module itself)."""
        key = module, imported
        if key not in self._files:
            self._files[key] = self._find(module, imported)
        return self._files[key]

    def _find(self, module: Module, imported: Imported) -> tuple[Module, str] | None:
        path = imported.module.lstrip(".")
        level = len(imported.module) - len(path)
        parts = path.split(".") if path else []
        parents = Path(module.path).resolve().parents
        if level:
            roots = [parents[level - 1]] if level <= len(parents) else []
        else:
            roots = [root for root in parents if parts and _exists(root / parts[0])]
        for root in roots:
            base = root.joinpath(*parts)
            if imported.name and (found := self._at(base / imported.name)) is not None:
                return found, ""
            if (found := self._at(base)) is not None:
                return found, imported.name
        return None

    def _at(self, base: Path) -> Module | None:
        for path in (base.with_name(base.name + ".py"), base / "__init__.py"):
            if path.is_file():
                return self._load(path)
        return None

    def definitions(
        self, module: Module, name: str, scope: Scope, depth: int = 4
    ) -> list[Definition]:
        """Return the functions and classes that a name means, in this file or an imported one."""
        own = module.bindings.definitions(name, scope)
        imported = module.imported(name, scope)
        if own or imported is None or depth == 0:
            return [(module, item) for item in own]
        found = self.file(module, imported)
        if found is None or not found[1]:
            return []
        return self.definitions(found[0], found[1], found[0].tree, depth - 1)


def _exists(base: Path) -> bool:
    return base.is_dir() or base.with_name(base.name + ".py").is_file()
