"""Level 1: Python that is outside the subset the NKI language guide describes.

The guide lists what is accepted and says that anything else is an error of the compiler. No
kernel of the documentation or of AWS's kernel library uses any of these constructs; two of them
are in kernels of awslabs/nki-autotune whose throughput was measured on trn2.
"""

import ast
from collections.abc import Iterator

from .bindings import FUNCTION_TYPES
from .finding import Finding, Kind
from .scope import Rule, Scope, constant_int, is_none

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
_MEASURED = (ast.ListComp, ast.Raise)
_KEYED = ("get", "pop", "setdefault")
_MAX_INT = 2**32 - 1
_MIN_INT = -(2**31)


def outside_the_subset(scope: Scope) -> Iterator[Finding]:
    """Statements and expressions that the guide's list does not have."""
    nested = isinstance(scope.module.scope_of(scope.function), FUNCTION_TYPES)
    for node in scope.nodes if nested else [scope.function, *scope.nodes]:
        entry = _OUTSIDE.get(type(node))
        if entry is not None:
            rule, what, replacement = entry
            message = f"{what}: not in the Python subset of NKI"
            kind = Kind.UNLISTED if isinstance(node, _MEASURED) else Kind.REJECTED
            yield scope.report(kind, rule, node, message, replacement)


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
    for node in scope.nodes:
        keys: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            keys = list(node.keys)
        elif isinstance(node, ast.Subscript) and scope.value(node.value).kind == "dict":
            keys = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            keyed = node.func.attr in _KEYED and scope.value(node.func.value).kind == "dict"
            keys = [*node.args[:1]] if keyed else []
        for key in keys:
            if key is not None and scope.value(key).kind not in ("", "str"):
                message = f"dict key {ast.unparse(key)} is not a string"
                use = "a string key, as f'{key}', or a list"
                yield scope.report(Kind.REJECTED, "dict-key", key, message, use)


def wide_integers(scope: Scope) -> Iterator[Finding]:
    """Integers have 32 bits."""
    for node in scope.nodes:
        if not isinstance(node, ast.Constant | ast.BinOp | ast.UnaryOp):
            continue
        value = constant_int(node)
        outer = constant_int(scope.parent(node)) is not None
        if value is not None and not outer and not _MIN_INT <= value <= _MAX_INT:
            message = f"integer {value} needs more than 32 bits"
            yield scope.report(Kind.REJECTED, "wide-integer", node, message, "32-bit integers")


def literals(scope: Scope) -> Iterator[Finding]:
    """Values are None, bool, int, float and str."""
    for node in scope.of(ast.Constant):
        if isinstance(node.value, bytes | complex):
            message = f"{type(node.value).__name__} literal: no value of NKI"
            use = "a string, or floats for the two parts"
            yield scope.report(Kind.REJECTED, "literal", node, message, use)


RULES: tuple[Rule, ...] = (
    outside_the_subset,
    identity,
    with_blocks,
    dict_keys,
    wide_integers,
    literals,
)
