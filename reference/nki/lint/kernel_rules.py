"""Level 1: signatures, arguments and results of kernels."""

import ast
from collections.abc import Iterator

from .finding import Finding, Kind
from .nki_names import dotted
from .scope import File, FileRule, Rule, Scope

_WRAPPERS = ("nki.jit", "nki.simulate")


def keyword_only(scope: Scope) -> Iterator[Finding]:
    """`*` in the signature of a kernel is not supported since 0.3.0."""
    for arg in scope.function.args.kwonlyargs if scope.is_kernel else ():
        message = f"keyword-only parameter {arg.arg} in a kernel signature"
        use = "no `*`; parameters with defaults come last"
        yield scope.report(Kind.REJECTED, "keyword-only", arg, message, use)


def list_parameters(scope: Scope) -> Iterator[Finding]:
    """A list as a kernel argument is not supported since 0.3.0."""
    args = scope.function.args
    if scope.is_kernel:
        for default in [*args.defaults, *args.kw_defaults]:
            if isinstance(default, ast.List):
                yield scope.report(Kind.REJECTED, *_list_argument(default))


def list_arguments(file: File) -> Iterator[Finding]:
    """Lists in calls of the file's kernels, from kernels and from the host."""
    kernels = {kernel.name for kernel in file.module.kernels}
    for node in file.module.bindings.scope_of:
        if not isinstance(node, ast.Call):
            continue
        callee = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        if isinstance(callee, ast.Call) and file.module.called(callee) in _WRAPPERS:
            callee = callee.args[0] if callee.args else callee
        if isinstance(callee, ast.Name) and callee.id in kernels:
            for argument in [*node.args, *(item.value for item in node.keywords)]:
                if isinstance(argument, ast.List):
                    yield file.report(Kind.REJECTED, *_list_argument(argument))


def _list_argument(node: ast.expr) -> tuple[str, ast.expr, str, str]:
    return "list-argument", node, "list as a kernel argument", "a tuple"


def outputs(scope: Scope) -> Iterator[Finding]:
    """A kernel returns tensors in nl.shared_hbm (0.3.0).

    Not complained about where another function of the file calls the kernel, and information
    only for on-chip tensors, which a kernel meant for other kernels may return.
    """
    if not scope.is_kernel or _is_called(scope):
        return
    for node in scope.of(ast.Return):
        if scope.module.scope_of(node) is not scope.function or node.value is None:
            continue
        values = node.value.elts if isinstance(node.value, ast.Tuple | ast.List) else [node.value]
        for value in values:
            kind, where, _ = scope.value(value)
            if kind == "tensor" and where not in ("", "shared_hbm"):
                message = f"kernel output {ast.unparse(value)} is in {where}"
                on_chip = where in ("sbuf", "psum")
                level = Kind.INFORMATION if on_chip else Kind.REJECTED
                yield scope.report(level, "output-buffer", node, message, "buffer=nl.shared_hbm")


def _is_called(scope: Scope) -> bool:
    return any(
        isinstance(node, ast.Call) and dotted(node.func) == scope.function.name
        for device_function in scope.module.device_functions
        for node in scope.module.code_nodes(device_function)
    )


def legacy_namespace(scope: Scope) -> Iterator[Finding]:
    """`neuronxcc.nki` inside a kernel does not compile since 0.4.0."""
    reported: set[str] = set()
    for node in scope.of(ast.Name):
        if node.id not in reported and scope.module.is_legacy(node):
            reported.add(node.id)
            message = f"{node.id} comes from neuronxcc.nki, which kernels cannot use since 0.4.0"
            use = "import nki, nki.language, nki.isa"
            yield scope.report(Kind.REMOVED, "neuronxcc", node, message, use)


RULES: tuple[Rule, ...] = (keyword_only, list_parameters, outputs, legacy_namespace)
FILE_RULES: tuple[FileRule, ...] = (list_arguments,)
