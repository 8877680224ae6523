"""Values that only the device has, and buffers that an operation does not take."""

import ast
from collections.abc import Iterator

from .api_rules import bound_arguments
from .finding import Finding, Kind
from .scope import Rule, Scope
from .value import NUMBERS

_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_ELEMENT_METHODS = ("item", "tolist", "numpy")
# function -> parameter that must not lie in PSUM, what to write instead
_NOT_FROM_PSUM = {
    "nki.isa.dma_copy": ("src", "nisa.tensor_copy to SBUF first"),
    "nki.language.store": ("value", "nisa.tensor_copy to SBUF first"),
    "nki.language.rsqrt": ("x", "nisa.activation(dst, op=nl.rsqrt, data=x)"),
}


def element_values(scope: Scope) -> Iterator[Finding]:
    """Elements of a tensor have no value while the kernel is built."""
    for node in scope.nodes:
        if isinstance(node, ast.Compare):
            if any(isinstance(item, _ORDER) for item in node.ops):
                for side in [node.left, *node.comparators]:
                    if scope.value(side).kind == "tensor":
                        yield _element(scope, node, f"comparison of tensor {ast.unparse(side)}")
                        break
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in ("int", "float", "bool"):
                for argument in node.args[:1]:
                    if scope.value(argument).kind == "tensor":
                        what = f"{node.func.id}() of tensor {ast.unparse(argument)}"
                        yield _element(scope, node, what)
            elif isinstance(node.func, ast.Attribute):
                reads = node.func.attr in _ELEMENT_METHODS
                if reads and scope.value(node.func.value).kind == "tensor":
                    yield _element(scope, node, f"{ast.unparse(node.func)}() of a tensor")


def _element(scope: Scope, node: ast.AST, what: str) -> Finding:
    message = f"{what}: its elements have no value at compile time"
    use = "nisa instructions on the tile, or nisa.register_load and a dynamic loop"
    return scope.report(Kind.REFUSED, "tensor-value", node, message, use)


def buffers(scope: Scope) -> Iterator[Finding]:
    """Operations that do not read PSUM."""
    for name, call in scope.calls:
        parameter, use = _NOT_FROM_PSUM.get(name, ("", ""))
        argument = dict(bound_arguments(name, call)).get(parameter)
        if argument is not None:
            value = scope.value(argument)
            if value.kind == "tensor" and value.detail == "psum":
                short = name.replace("nki.isa", "nisa").replace("nki.language", "nl")
                message = f"{short} of {ast.unparse(argument)}, which is in PSUM"
                yield scope.report(Kind.REFUSED, "psum-operand", call, message, use)


def scalars(scope: Scope) -> Iterator[Finding]:
    """Functions that take tiles where a number is given."""
    for name, call in scope.calls:
        arguments = dict(bound_arguments(name, call))
        if name == "nki.language.power" and _is_number(scope, arguments.get("y")):
            message = "nl.power(tile, scalar) fails to compile"
            use = "nl.power(tile, tile) with the exponent from nl.full, or nl.multiply"
            yield scope.report(Kind.REFUSED, "unsupported-api", call, message, use)
        elif name == "nki.language.random_seed" and _is_number(scope, arguments.get("seed")):
            message = "nl.random_seed takes a [1, 1] tensor, not a number"
            use = "nl.random_seed(nl.full((1, 1), seed, dtype=nl.int32))"
            yield scope.report(Kind.REFUSED, "unsupported-api", call, message, use)


def _is_number(scope: Scope, node: ast.AST | None) -> bool:
    return node is not None and scope.value(node).kind in NUMBERS


RULES: tuple[Rule, ...] = (element_values, buffers, scalars)
