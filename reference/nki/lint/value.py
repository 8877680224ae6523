"""Kinds of values in kernel code, and which calls make them."""

import ast
from typing import NamedTuple

from . import signatures
from .module import Module


class Value(NamedTuple):
    """A kind of value: "int", "str", "tensor", "register", ...; "" if it is not known.

    `detail` is the buffer of a tensor or the name of an NKI attribute; `item` the kind of all
    elements of a container.
    """

    kind: str
    detail: str = ""
    item: "Value | None" = None


UNKNOWN = Value("")
NOTHING = Value("nothing")  # no value yet, while a scope is worked out
INT, FLOAT, BOOL, STR = Value("int"), Value("float"), Value("bool"), Value("str")
NUMBERS = ("bool", "int", "float")
SEQUENCES = ("list", "tuple")
RUN_TIME = ("register", "scalar")  # VirtualRegister and NkiScalar
CONSTANTS: dict[type, Value] = {
    bool: BOOL,
    int: INT,
    float: FLOAT,
    str: STR,
    bytes: Value("bytes"),
    complex: Value("complex"),
    type(None): Value("none"),
}
BUILTINS = {
    "len": INT,
    "int": INT,
    "float": FLOAT,
    "str": STR,
    "bool": BOOL,
    "isinstance": BOOL,
    "range": Value("range", "", INT),
    "list": Value("list"),
    "tuple": Value("tuple"),
    "dict": Value("dict"),
    "set": Value("set"),
    "frozenset": Value("set"),
    "slice": Value("slice"),
    "divmod": Value("tuple"),
}
MATH_INTS = ("ceil", "floor", "gcd", "prod", "comb", "factorial", "isqrt")
NEW_TENSORS = ("ndarray", "zeros", "ones", "full")
TENSOR_NUMBERS = ("ndim", "size", "offset")
TENSOR_METHODS = (
    *("ap", "broadcast", "expand_dim", "flatten_dims", "permute", "rearrange", "reshape"),
    *("reshape_dim", "select", "slice", "squeeze_dim", "vector_select", "view"),
)


def join(left: Value, right: Value) -> Value:
    """Return the kind of what is one or the other."""
    if left is NOTHING or left == right:
        return right
    if right is NOTHING:
        return left
    if left.kind != right.kind or left.kind == "nki":
        return UNKNOWN
    detail = left.detail if left.detail == right.detail else ""
    return Value(left.kind, detail, left.item if left.item == right.item else None)


def new_buffer(module: Module, name: str, call: ast.Call) -> str:
    """Return the buffer of a new tensor ("sbuf" by default), "" if it is not known."""
    signature = signatures.signature(name)
    given = dict(zip(signature.parameters if signature else (), call.args, strict=False))
    given |= {item.arg: item.value for item in call.keywords if item.arg is not None}
    if "buffer" in given:
        full = module.nki_name(given["buffer"])
        return full.rpartition(".")[2] if full.startswith("nki.language.") else ""
    expanded = any(item.arg is None for item in call.keywords)
    expanded = expanded or any(isinstance(item, ast.Starred) for item in call.args)
    return "" if expanded else "sbuf"
