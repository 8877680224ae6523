"""Results of kernels, and the namespace of the old language."""

import ast
from collections.abc import Iterator

from .finding import Finding, Kind
from .nki_names import dotted
from .scope import Rule, Scope


def outputs(scope: Scope) -> Iterator[Finding]:
    """A kernel returns tensors in nl.shared_hbm (0.3.0).

    Not complained about where another function of the file calls the kernel, nor for tensors on the
    chip, which a kernel meant for other kernels may return.
    """
    if not scope.is_kernel or _is_called(scope):
        return
    for node in scope.of(ast.Return):
        if scope.module.scope_of(node) is not scope.function or node.value is None:
            continue
        values = node.value.elts if isinstance(node.value, ast.Tuple | ast.List) else [node.value]
        for value in values:
            kind, where, _ = scope.value(value)
            if kind == "tensor" and where in ("hbm", "private_hbm"):
                message = f"kernel output {ast.unparse(value)} is in {where}"
                use = "buffer=nl.shared_hbm"
                yield scope.report(Kind.REFUSED, "output-buffer", node, message, use)


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


RULES: tuple[Rule, ...] = (outputs, legacy_namespace)
