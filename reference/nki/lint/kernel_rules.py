"""Level 1: signatures and results of kernels, and the classes that kernel code uses."""

import ast
from collections.abc import Iterator

from .finding import Finding, Kind
from .module import LEGACY_ROOT
from .scope import Rule, Scope

_OUTPUT = "nki.language.shared_hbm"
_ENUM_BASES = ("Enum", "IntEnum", "StrEnum")


def keyword_only(scope: Scope) -> Iterator[Finding]:
    """`*` in the signature of a kernel is not supported since 0.3.0."""
    for arg in scope.function.args.kwonlyargs if scope.is_kernel else ():
        message = f"keyword-only parameter {arg.arg} in a kernel signature"
        use = "no `*`; parameters with defaults come last"
        yield scope.report(Kind.REJECTED, "keyword-only", arg, message, use)


def list_arguments(scope: Scope) -> Iterator[Finding]:
    """A list as a kernel argument is not supported since 0.3.0."""
    if scope.is_kernel:
        for default in scope.function.args.defaults:
            if isinstance(default, ast.List):
                yield _list_argument(scope, default)
    kernels = {kernel.name for kernel in scope.module.kernels}
    for node in scope.of(ast.Call):
        callee = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        if isinstance(callee, ast.Name) and callee.id in kernels:
            for argument in [*node.args, *(item.value for item in node.keywords)]:
                if isinstance(argument, ast.List):
                    yield _list_argument(scope, argument)


def _list_argument(scope: Scope, node: ast.List) -> Finding:
    return scope.report(
        Kind.REJECTED, "list-argument", node, "list as a kernel argument", "a tuple"
    )


def outputs(scope: Scope) -> Iterator[Finding]:
    """A kernel returns tensors in nl.shared_hbm (0.3.0).

    Not complained about where another function of the file calls the kernel, and information
    only for on-chip tensors, which a kernel meant for other kernels may return.
    """
    if not scope.is_kernel or _is_called(scope):
        return
    buffers = _buffers(scope)
    for node in scope.of(ast.Return):
        values = node.value.elts if isinstance(node.value, ast.Tuple | ast.List) else [node.value]
        for value in values:
            buffer = buffers.get(value.id, "") if isinstance(value, ast.Name) else ""
            if buffer not in ("", _OUTPUT):
                where = buffer.removeprefix("nki.language.")
                message = f"kernel output {ast.unparse(value or node)} is in {where}"
                use = "buffer=nl.shared_hbm"
                on_chip = where in ("sbuf", "psum")
                kind = Kind.INFORMATION if on_chip else Kind.REJECTED
                yield scope.report(kind, "output-buffer", node, message, use)


def _is_called(scope: Scope) -> bool:
    return any(
        isinstance(node, ast.Call) and scope.module.dotted(node.func) == scope.function.name
        for device_function in scope.module.device_functions
        for node in scope.module.code_nodes(device_function)
    )


def _buffers(scope: Scope) -> dict[str, str]:
    """Map names that are assigned exactly once, from nl.ndarray or nl.zeros, to their buffer."""
    assigned: dict[str, list[str]] = {}
    for node in scope.of(ast.Assign):
        for target in node.targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    assigned.setdefault(name.id, []).append(_buffer(scope, node.value))
    return {name: found[0] for name, found in assigned.items() if len(found) == 1}


def _buffer(scope: Scope, value: ast.expr) -> str:
    name = scope.module.called(value)
    if name not in ("nki.language.ndarray", "nki.language.zeros", "nki.language.ones"):
        return ""
    assert isinstance(value, ast.Call)
    for keyword in value.keywords:
        if keyword.arg == "buffer":
            return scope.module.nki_name(keyword.value)
    if len(value.args) > 2:
        return scope.module.nki_name(value.args[2])
    return "" if any(item.arg is None for item in value.keywords) else "nki.language.sbuf"


def classes(scope: Scope) -> Iterator[Finding]:
    """A class used in kernel code inherits NKIObject (or Enum) and nothing else."""
    for node in scope.of(ast.Name):
        cls = scope.module.classes.get(node.id)
        if cls is None:
            continue
        bases = [scope.module.dotted(base).split(".")[-1] for base in cls.bases]
        if len(bases) == 1 and (bases[0] == "NKIObject" or bases[0] in _ENUM_BASES):
            continue
        message = f"class {cls.name} in kernel code has bases ({', '.join(bases)})"
        use = f"class {cls.name}(NKIObject) and no other base"
        yield scope.report(Kind.REJECTED, "class-base", node, message, use)


def legacy_namespace(scope: Scope) -> Iterator[Finding]:
    """`neuronxcc.nki` inside a kernel does not compile since 0.4.0."""
    reported: set[str] = set()
    for node in scope.of(ast.Name):
        if node.id in scope.module.legacy and node.id not in reported:
            reported.add(node.id)
            message = f"{node.id} comes from {LEGACY_ROOT}, which kernels cannot use since 0.4.0"
            yield scope.report(
                Kind.REMOVED, "neuronxcc", node, message, "import nki, nki.language, nki.isa"
            )


RULES: tuple[Rule, ...] = (keyword_only, list_arguments, outputs, classes, legacy_namespace)
