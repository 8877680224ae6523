"""Removed, renamed and deprecated API, and calls that do not fit a signature."""

import ast
import inspect
from collections.abc import Iterator

from .. import changes as tables
from . import signatures
from .finding import Finding, Kind
from .scope import File, Rule, Scope, literal_int

_ENUM_PARAMETERS = {
    "engine": "nisa.engine",
    "dge_mode": "nisa.dge_mode",
    "oob_mode": "nisa.oob_mode",
    "reduce_cmd": "nisa.reduce_cmd",
    "perf_mode": "nisa.matmul_perf_mode",
    "dma_engine": "nisa.dma_engine",
}
_NAMED_CHANGES = (
    (tables.REMOVED, Kind.REMOVED, "removed-api"),
    (tables.UNSUPPORTED, Kind.REFUSED, "unsupported-api"),
    (tables.DEPRECATED, Kind.DEPRECATED, "deprecated-api"),
)

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def names(scope: Scope) -> Iterator[Finding]:
    """Names that are gone, unsupported or deprecated."""
    for node in scope.nodes:
        name = scope.module.nki_name(node)
        if not name or isinstance(getattr(node, "ctx", None), ast.Store):
            continue
        for table, kind, rule in _NAMED_CHANGES:
            if name in table:
                change = table[name]
                message = f"{tables.short(name)}: {change.what}"
                yield scope.report(kind, rule, node, message, change.replacement)


def unknown_names(scope: Scope) -> Iterator[Finding]:
    """Names that the API does not have; harmless in a branch that is never taken."""
    for node in scope.nodes:
        name = scope.module.nki_name(node)
        if not name or any(name in table for table, _, _ in _NAMED_CHANGES):
            continue
        if not signatures.exists(name):
            owner, _, attribute = name.rpartition(".")
            message = f"{tables.short(name)} is not part of NKI 0.7"
            close = tables.ABSENT.get(name) or tables.closest(attribute, signatures.names(owner))
            close = close or f"a name in dir({tables.short(owner + '.')[:-1]})"
            yield scope.report(Kind.REMOVED, "unknown-api", node, message, close)


def unknown_attributes(scope: Scope) -> Iterator[Finding]:
    """Attributes that NkiTensor does not have."""
    known = signatures.tensor_attributes()
    for node in scope.of(ast.Attribute):
        if node.attr not in known and scope.value(node.value).kind == "tensor":
            message = f"NkiTensor.{node.attr} is not part of NKI 0.7"
            use = tables.ABSENT_OF_TENSORS.get(node.attr) or tables.closest(node.attr, tuple(known))
            use = use or "a method in dir(nl.NkiTensor)"
            yield scope.report(Kind.REMOVED, "unknown-api", node, message, use)


def keywords(scope: Scope) -> Iterator[Finding]:
    """Keywords that are gone, or that no signature has (an error since 0.2.0)."""
    for name, call in scope.calls:
        signature = signatures.signature(name)
        for keyword in call.keywords:
            if keyword.arg is None:
                continue
            label = f"{tables.short(name)}({keyword.arg}=)"
            change = _keyword_change(name, keyword.arg)
            if change is not None:
                message = f"{label}: {change.what}"
                yield scope.report(
                    Kind.REMOVED, "removed-keyword", keyword, message, change.replacement
                )
            elif (name, keyword.arg) in tables.DEPRECATED_KEYWORDS:
                change = tables.DEPRECATED_KEYWORDS[name, keyword.arg]
                message = f"{label}: {change.what}"
                yield scope.report(
                    Kind.DEPRECATED, "deprecated-api", keyword, message, change.replacement
                )
            elif signature is not None and not _accepts(signature, keyword.arg):
                use = tables.closest(keyword.arg, tuple(signature.parameters))
                if name.startswith("nki.isa.") and keyword.arg in tables.OF_DESTINATION:
                    use = f"dst=nl.ndarray(...), which has the {keyword.arg}"
                elif signature.parameters and not use:
                    use = f"one of {', '.join(signature.parameters)}"
                message = f"{label}: no such parameter"
                yield scope.report(Kind.REFUSED, "unknown-keyword", keyword, message, use)


def _keyword_change(name: str, keyword: str) -> tables.Change | None:
    if (name, keyword) in tables.REMOVED_KEYWORDS:
        return tables.REMOVED_KEYWORDS[name, keyword]
    if keyword == "num_channels" and name.startswith("nki.collectives."):
        signature = signatures.signature(name)
        for parameter, change in tables.NUM_CHANNELS.items():
            if signature is not None and parameter in signature.parameters:
                return change
    if name.startswith(("nki.isa.", "nki.language.")):
        return tables.REMOVED_KEYWORDS.get(("", keyword))
    return None


def _accepts(signature: inspect.Signature, keyword: str) -> bool:
    return keyword in signature.parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()
    )


def jit_options(scope: Scope) -> Iterator[Finding]:
    """Options of nki.jit, as a decorator, that raise or are ignored."""
    for decorator in scope.function.decorator_list:
        if isinstance(decorator, ast.Call) and scope.module.wraps_as_kernel(decorator):
            yield from jit_keywords(scope.file, decorator)


def jit_keywords(file: File, call: ast.Call) -> Iterator[Finding]:
    """Yield the options of one call of nki.jit that raise or are ignored."""
    for keyword in call.keywords:
        key = ("nki.jit", keyword.arg or "")
        for table, kind, rule in (
            (tables.REMOVED_KEYWORDS, Kind.REMOVED, "removed-keyword"),
            (tables.DEPRECATED_KEYWORDS, Kind.DEPRECATED, "deprecated-api"),
        ):
            if key in table:
                message = f"nki.jit({keyword.arg}=): {table[key].what}"
                yield file.report(kind, rule, keyword, message, table[key].replacement)


def missing_arguments(scope: Scope) -> Iterator[Finding]:
    """Required arguments; without `dst` it is the return style that 0.2.0 removed."""
    for name, call in scope.calls:
        signature = signatures.signature(name)
        if signature is None or _expands(call):
            continue
        parameters = [p for p in signature.parameters.values() if p.kind in _NAMED]
        by_position = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        given = {keyword.arg for keyword in call.keywords}
        given |= set(by_position[: len(call.args)])
        required = [p.name for p in parameters if p.default is p.empty]
        missing = [parameter for parameter in required if parameter not in given]
        starred = len(parameters) < len(signature.parameters)
        if len(call.args) > len(by_position) and not starred:
            message = f"{tables.short(name)} takes {len(by_position)} arguments by position"
            yield scope.report(Kind.REFUSED, "missing-argument", call, message, _usage(name))
            continue
        if "dst" in missing or (missing and _is_value(scope, call) and "dst" in required):
            message = f"{tables.short(name)} without dst: return-style calls were removed in 0.2.0"
            use = f"{tables.short(name)}(dst, ...) as a statement, with dst = nl.ndarray(...)"
            yield scope.report(Kind.REMOVED, "missing-dst", call, message, use)
        elif missing:
            message = f"{tables.short(name)} without {', '.join(missing)}"
            yield scope.report(Kind.REFUSED, "missing-argument", call, message, _usage(name))


def _usage(name: str) -> str:
    """Return a call with its required parameters."""
    signature = signatures.signature(name)
    parameters = list(signature.parameters.values()) if signature is not None else []
    given = [
        f"{item.name}=..." if item.kind is item.KEYWORD_ONLY else item.name
        for item in parameters
        if item.default is item.empty or item.kind is item.KEYWORD_ONLY
    ]
    optional = ["..."] if len(given) < len(parameters) else []
    return f"{tables.short(name)}({', '.join(given + optional)})"


def _expands(call: ast.Call) -> bool:
    return any(isinstance(item, ast.Starred) for item in call.args) or any(
        item.arg is None for item in call.keywords
    )


def _is_value(scope: Scope, call: ast.Call) -> bool:
    return not isinstance(scope.parent(call), ast.Expr)


def argument_order(scope: Scope) -> Iterator[Finding]:
    """Positional arguments in the order that 0.3.0 changed."""
    for name, call in scope.calls:
        if name == "nki.isa.affine_select" and _is_number(call.args[5:6]):
            message = "nisa.affine_select with offset as the 3rd positional argument"
            use = "(dst, pattern, channel_multiplier, on_true_tile, on_false_value, offset=...)"
            yield scope.report(Kind.REMOVED, "argument-order", call, message, use)
        operators = [scope.module.nki_name(argument) for argument in call.args[3:4]]
        if name == "nki.isa.dma_compute" and "".join(operators).startswith("nki.language."):
            message = "nisa.dma_compute with scales before reduce_op"
            use = "(dst, srcs, reduce_op, scales=None, unique_indices=True)"
            yield scope.report(Kind.REMOVED, "argument-order", call, message, use)


def _is_number(arguments: list[ast.expr]) -> bool:
    """Whether there is an argument and it is a number, as on_false_value is in the old order."""
    return any(
        isinstance(
            argument.operand if isinstance(argument, ast.UnaryOp) else argument, ast.Constant
        )
        for argument in arguments
    )


def constants(scope: Scope) -> Iterator[Finding]:
    """Buffers as strings and enums as integers are rejected since 0.3.0."""
    for name, call in scope.calls:
        for parameter, value in bound_arguments(name, call):
            if parameter == "buffer" and scope.value(value).kind == "str":
                message = f"buffer {ast.unparse(value)} as a string"
                use = "nl.sbuf, nl.psum, nl.shared_hbm, ..."
                if isinstance(value, ast.Constant):
                    use = f"nl.{value.value!s}"
                yield scope.report(Kind.REFUSED, "string-buffer", value, message, use)
            elif parameter in _ENUM_PARAMETERS and literal_int(value) is not None:
                message = f"integer {ast.unparse(value)} for {parameter}"
                use = f"a member of {_ENUM_PARAMETERS[parameter]}"
                yield scope.report(Kind.REFUSED, "integer-enum", value, message, use)


def bound_arguments(name: str, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yield (parameter name, argument); positional ones need a known signature."""
    signature = signatures.signature(name)
    if signature is not None:
        yield from zip(signature.parameters, call.args, strict=False)
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value


def documented_failures(scope: Scope) -> Iterator[Finding]:
    """Calls that the release notes list as failing on the device."""
    for name, call in scope.calls:
        arguments = dict(bound_arguments(name, call))
        if name == "nki.language.matmul":
            transposed = arguments.get("transpose_x")
            if not (isinstance(transposed, ast.Constant) and transposed.value is True):
                message = "nl.matmul without transpose_x=True fails to compile"
                use = "nl.matmul(x, y, transpose_x=True) with x transposed beforehand"
                yield scope.report(Kind.REFUSED, "unsupported-api", call, message, use)


RULES: tuple[Rule, ...] = (
    names,
    unknown_names,
    unknown_attributes,
    keywords,
    jit_options,
    missing_arguments,
    argument_order,
    constants,
    documented_failures,
)
