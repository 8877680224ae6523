"""Level 1: Python that is outside the subset the NKI language guide describes.

The guide lists what is accepted and says that anything else is an error of the compiler. No
kernel of the documentation or of AWS's kernel library uses any of these constructs.
"""

import ast
from collections.abc import Iterator

from .finding import Finding, Kind
from .scope import Rule, Scope, is_none, literal_int

_LOOP = "a for loop that appends to a list"
_OUTSIDE: dict[type[ast.AST], tuple[str, str, str]] = {
    ast.Try: ("try", "try statement", "an if or assert on the condition"),
    ast.TryStar: ("try", "try statement", "an if or assert on the condition"),
    ast.Raise: ("raise", "raise statement", "assert condition, message"),
    ast.Import: ("import", "import inside kernel code", "an import at the top of the file"),
    ast.ImportFrom: ("import", "import inside kernel code", "an import at the top of the file"),
    ast.Global: ("global", "global statement", "an argument and a return value"),
    ast.Nonlocal: ("nonlocal", "nonlocal statement", "a list, a dict or a tensor in SBUF"),
    ast.Delete: ("del", "del statement", "list.remove or dict.pop"),
    ast.Match: ("match", "match statement", "if, elif and else"),
    ast.ClassDef: ("nested-class", "class inside kernel code", "a class at the top of the file"),
    ast.AsyncFunctionDef: ("async", "async function", "a plain function"),
    ast.AsyncFor: ("async", "async for", "a plain for loop"),
    ast.AsyncWith: ("async", "async with", "with nl.no_reorder()"),
    ast.Await: ("async", "await", "a plain call"),
    ast.Yield: ("generator", "generator", "a function that returns a list"),
    ast.YieldFrom: ("generator", "generator", "a function that returns a list"),
    ast.GeneratorExp: ("comprehension", "generator expression", _LOOP),
    ast.ListComp: ("comprehension", "list comprehension", _LOOP),
    ast.SetComp: ("comprehension", "set comprehension", _LOOP),
    ast.DictComp: ("comprehension", "dict comprehension", "a for loop that fills a dict"),
    ast.Lambda: ("lambda", "lambda", "a function at the top of the file"),
    ast.NamedExpr: ("walrus", "assignment expression", "a statement of its own"),
    ast.Set: ("set", "set", "a list or tuple"),
}
_MAX_INT = 2**32 - 1
_MIN_INT = -(2**31)


def outside_the_subset(scope: Scope) -> Iterator[Finding]:
    """Statements and expressions that the guide's list does not have."""
    for node in scope.nodes:
        entry = _OUTSIDE.get(type(node))
        if entry is not None:
            rule, what, replacement = entry
            message = f"{what}: not in the Python subset of NKI"
            yield scope.report(Kind.REJECTED, rule, node, message, replacement)


def identity(scope: Scope) -> Iterator[Finding]:
    """`is` is not supported since 0.3.0; AWS's own kernels keep `is None`."""
    for node in scope.of(ast.Compare):
        sides = [node.left, *node.comparators]
        for position, operator in enumerate(node.ops):
            if not isinstance(operator, ast.Is | ast.IsNot):
                continue
            word, use = ("is", "==") if isinstance(operator, ast.Is) else ("is not", "!=")
            kind = Kind.REJECTED
            if is_none(sides[position + 1]) or is_none(sides[position]):
                kind = Kind.INFORMATION
            yield scope.report(kind, "is", node, f"`{word}` is not supported", f"`{use}`")


def with_blocks(scope: Scope) -> Iterator[Finding]:
    """`with nl.no_reorder():` is the only context manager."""
    for node in scope.of(ast.With):
        for item in node.items:
            if scope.module.called(item.context_expr) != "nki.language.no_reorder":
                yield scope.report(
                    Kind.REJECTED,
                    "with",
                    node,
                    "the only context manager of NKI is nl.no_reorder()",
                    "plain statements",
                )


def dict_keys(scope: Scope) -> Iterator[Finding]:
    """Dicts have string keys."""
    dicts = _names_of_dicts(scope)
    for node in scope.of(ast.Dict):
        for key in node.keys:
            if isinstance(key, ast.Constant) and not isinstance(key.value, str):
                yield _dict_key(scope, key)
    for item in scope.of(ast.Subscript):
        if isinstance(item.value, ast.Name) and item.value.id in dicts:
            index = item.slice
            not_string = isinstance(index, ast.Constant) and not isinstance(index.value, str)
            if not_string or isinstance(index, ast.Tuple):
                yield _dict_key(scope, index)


def _dict_key(scope: Scope, key: ast.expr) -> Finding:
    message = f"dict key {ast.unparse(key)} is not a string"
    return scope.report(Kind.REJECTED, "dict-key", key, message, "a string key or a list")


def _names_of_dicts(scope: Scope) -> set[str]:
    """Return the local names that only ever hold a new dict."""
    dicts: set[str] = set()
    others: set[str] = set(scope.parameters)
    for node in scope.of(ast.Assign):
        is_dict = isinstance(node.value, ast.Dict) or (
            isinstance(node.value, ast.Call) and scope.module.dotted(node.value.func) == "dict"
        )
        for target in node.targets:
            if isinstance(target, ast.Name):
                (dicts if is_dict else others).add(target.id)
    return dicts - others


def wide_integers(scope: Scope) -> Iterator[Finding]:
    """Integers have 32 bits."""
    for node in scope.of(ast.Constant):
        value = literal_int(node)
        if value is not None and not _MIN_INT <= value <= _MAX_INT:
            message = f"integer {value} needs more than 32 bits"
            yield scope.report(Kind.REJECTED, "wide-integer", node, message, "32-bit integers")


RULES: tuple[Rule, ...] = (
    outside_the_subset,
    identity,
    with_blocks,
    dict_keys,
    wide_integers,
)
