"""Mutations of a Python module: one small fault each.

A mutation changes one comparison, arithmetic operator, number, truth value, `and`/`or`, `not`, or
removes one statement.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
REMOVABLE = (ast.Expr, ast.AugAssign, ast.Assign, ast.Continue, ast.Break, ast.Raise, ast.Return)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Place:
    """Where a node stands.

    function: qualified name of its function or class, "" in the module itself. lines: those whose
    execution reaches it: of its statement, of the whole function for defaults, none for what is
    evaluated on import. digest: of the function's text, or of the statement outside functions.
    """

    function: str
    lines: range
    digest: str
    in_function: bool = False


@dataclass(frozen=True)
class Mutation:
    """One small fault: where it is, what it changes, and how to make it."""

    place: Place
    line: int
    change: str
    node: int
    choice: int

    def apply(self, source: str) -> str:
        """The faulty source."""
        tree = ast.parse(source)
        _apply(list(ast.walk(tree))[self.node], self.choice)
        return ast.unparse(tree)


def mutations_of(source: str) -> Iterator[Mutation]:
    """Every mutation of a module. Docstrings are left alone."""
    tree = ast.parse(source)
    places: dict[ast.AST, Place] = {}
    _find_places(tree, Place("", range(0), ""), places)
    for number, node in enumerate(ast.walk(tree)):
        removable = _removable_statements(node)
        changes = _changes(node)
        for choice, change in enumerate(changes):
            removed = choice - (len(changes) - len(removable))
            changed = node
            if removed >= 0:
                name, index = removable[removed]
                changed = getattr(node, name)[index]
            line = getattr(changed, "lineno", 0)
            before = ast.unparse(node).splitlines()[0][:90]
            yield Mutation(places[changed], line, f"{before}: {change}", number, choice)


def _find_places(node: ast.AST, place: Place, places: dict[ast.AST, Place]) -> None:
    places[node] = place
    for child in ast.iter_child_nodes(node):
        _find_places(child, _place_of(child, place), places)


def _place_of(node: ast.AST, around: Place) -> Place:
    """The place of a node whose parent stands at `around`."""
    if not isinstance(node, ast.stmt):
        return around
    last = node.end_lineno or node.lineno
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        name = f"{around.function}.{node.name}".lstrip(".")
        in_function = around.in_function or isinstance(node, FUNCTIONS)
        lines = range(node.lineno, last + 1) if in_function else range(0)
        return Place(name, lines, _digest(node), in_function)
    if not around.in_function:
        return Place(around.function, range(0), _digest(node))
    body = getattr(node, "body", None)
    if body:  # of a compound statement the header
        last = max(node.lineno, body[0].lineno - 1)
    return Place(around.function, range(node.lineno, last + 1), around.digest, True)


def _digest(node: ast.AST) -> str:
    return sha256(ast.unparse(node).encode()).hexdigest()[:12]


def _removable_statements(node: ast.AST) -> list[tuple[str, int]]:
    """Statements that a node's bodies can do without, as (field, place)."""
    found = []
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(node, name, None)
        if not isinstance(statements, list) or isinstance(node, ast.ClassDef | ast.Module):
            continue
        for place, statement in enumerate(statements):
            is_docstring = isinstance(statement, ast.Expr) and isinstance(
                statement.value, ast.Constant
            )
            if isinstance(statement, REMOVABLE) and not is_docstring:
                found.append((name, place))
    return found


def _changes(node: ast.AST) -> list[str]:
    """Descriptions of what can be changed at this node itself."""
    changes = []
    if isinstance(node, ast.Compare):
        changes = [
            f"{type(op).__name__} -> {COMPARISONS[type(op)].__name__}"
            for op in node.ops
            if type(op) in COMPARISONS
        ]
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        changes = [f"{type(node.op).__name__} -> {OPERATORS[type(node.op)].__name__}"]
    elif isinstance(node, ast.BoolOp):
        changes = ["and <-> or"]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        changes = ["not removed"]
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        changes = [f"{node.value} -> {_other(node.value)}"]
    for name, place in _removable_statements(node):
        statement = ast.unparse(getattr(node, name)[place]).splitlines()[0]
        changes.append(f"without `{statement[:80]}`")
    return changes


def _other(value: int) -> int:
    return not value if isinstance(value, bool) else value + 1


def _apply(node: ast.AST, choice: int) -> None:
    removable = _removable_statements(node)
    first_removal = len(_changes(node)) - len(removable)
    if choice >= first_removal:
        name, place = removable[choice - first_removal]
        getattr(node, name)[place] = ast.Pass()
    elif isinstance(node, ast.Compare):
        places = [place for place, op in enumerate(node.ops) if type(op) in COMPARISONS]
        old = node.ops[places[choice]]
        node.ops[places[choice]] = COMPARISONS[type(old)]()
    elif isinstance(node, ast.BinOp | ast.AugAssign):
        node.op = OPERATORS[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.UnaryOp):
        vars(node).update(op=ast.UAdd(), operand=_as_bool(node.operand))
    elif isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        node.value = _other(node.value)


def _as_bool(operand: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("bool", ast.Load()), [operand], [])
