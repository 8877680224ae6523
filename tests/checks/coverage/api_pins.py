"""Finds for each NKI name the most specific test that uses it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ALIASES = {"nki": "nki", "nisa": "nki.isa", "nl": "nki.language", "ncc": "nki.collectives"}
ALIASES |= {"compiler": "nki.compiler", "simulator": "nki.simulator"}


@dataclass
class _Test:
    label: str
    names: frozenset[str]


@dataclass
class Pins:
    """The tests of a folder with the NKI names each of them mentions."""

    tests: list[_Test] = field(default_factory=list)

    def find(self, module: str, name: str) -> str:
        """Return `file::test` of the most specific test for a name, or "".

        A test named after the API comes first, then the one that mentions the fewest names.
        """
        users = self.users(module, name)
        plain = name.split(".")[-1].strip("_")
        users.sort(key=lambda test: (plain not in test.label, len(test.names), test.label))
        return users[0].label if users else ""

    def users(self, module: str, name: str) -> list[_Test]:
        """Return the tests that mention a name."""
        # A class is tested by making one; the class of nl.tile_size has no public name.
        name = name.removesuffix(".__init__").replace("_TileSize", "tile_size")
        wanted = name if "." in name else f"{module}.{name}"
        users = [test for test in self.tests if wanted in test.names]
        if not users and "." in name:
            # A method or attribute is reached through an instance: any mention counts.
            users = [test for test in self.tests if f".{name.split('.')[1]}" in test.names]
        return users


def read_pins(folder: Path) -> Pins:
    """Return the pins of all `test_*.py` files in `folder`."""
    pins = Pins()
    for path in sorted(folder.glob("test_*.py")):
        for name, used in _tests(ast.parse(path.read_text())):
            pins.tests.append(_Test(f"{path.name}::{name}", used))
    return pins


def _tests(module: ast.Module) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield each test with the names in it and in the module's own functions it reaches."""
    functions = {
        node.name: node
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    constants = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for name, node in functions.items():
        if not name.startswith("test"):
            continue
        used: set[str] = set()
        queue: list[ast.AST] = [node]
        seen: set[str] = {name}
        while queue:
            current = queue.pop()
            used |= _mentions(current)
            for child in ast.walk(current):
                if isinstance(child, ast.Name) and child.id not in seen:
                    seen.add(child.id)
                    definition = functions.get(child.id) or constants.get(child.id)
                    if definition is not None:
                        queue.append(definition)
        yield name, frozenset(used)


def _mentions(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        names.add(f".{node.attr}")
        if isinstance(node.value, ast.Name):
            if node.value.id in ALIASES:
                names.add(f"{ALIASES[node.value.id]}.{node.attr}")
            names.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node.value, ast.Attribute):
            names.add(f"{node.value.attr}.{node.attr}")
    return names
