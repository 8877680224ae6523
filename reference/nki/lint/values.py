"""What kind of value an expression of kernel code has, as far as the file alone tells."""

import ast
from collections.abc import Callable, Mapping

from . import signatures
from . import value as kinds
from .bindings import FUNCTION_TYPES, Bound, Element, Function, Imported, Scope
from .module import Module
from .nki_names import dotted
from .value import BOOL, FLOAT, INT, STR, UNKNOWN, Value, join

_DEPTH = 100  # nested expressions that are looked into
_ANNOTATED = {"VirtualRegister": Value("register"), "NkiScalar": Value("scalar")}


class Values:
    """The values of one file; `bodies` are its loop bodies, whose argument is on the device."""

    def __init__(self, module: Module, bodies: Mapping[Function, str]) -> None:
        self.module = module
        self.bodies = bodies
        self._scopes: dict[Scope, dict[str, Value]] = {}
        self._depth = 0

    def of(self, node: ast.AST) -> Value:
        """Return the kind of an expression, UNKNOWN if it is not known."""
        scope = self.module.bindings.scope_of.get(node)
        found = UNKNOWN if scope is None else self._evaluate(node, scope)
        return UNKNOWN if found is kinds.NOTHING else found

    def _scope(self, scope: Scope) -> dict[str, Value]:
        """Work out the names of a scope, until a round changes nothing."""
        if scope not in self._scopes:
            bound = self.module.bindings.bound[scope]
            values = self._scopes[scope] = dict.fromkeys(bound, kinds.NOTHING)
            changed = True
            while changed:
                changed = False
                for name, items in bound.items():
                    found = values[name]
                    for item in items:
                        found = join(found, self._bound(item, name, scope))
                    changed = changed or found != values[name]
                    values[name] = found
        return self._scopes[scope]

    def _bound(self, item: Bound, name: str, scope: Scope) -> Value:
        if isinstance(item, Element):
            return self._element(item.container, scope)
        if isinstance(item, FUNCTION_TYPES):
            return Value("function", item.name)
        if isinstance(item, ast.expr):
            return self._evaluate(item, scope)
        if isinstance(item, Imported):
            return UNKNOWN
        return self._parameter(name, scope) if isinstance(scope, FUNCTION_TYPES) else UNKNOWN

    def _parameter(self, name: str, function: Function) -> Value:
        args = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        for position, arg in enumerate(args):
            if arg.arg == name:
                if position == 0 and function in self.bodies:
                    counts = self.bodies[function] == "fori_loop"
                    return Value("scalar" if counts else "register")
                annotation = dotted(arg.annotation) if arg.annotation is not None else ""
                return _ANNOTATED.get(annotation.split(".")[-1], UNKNOWN)
        return UNKNOWN

    def _element(self, container: ast.expr, scope: Scope) -> Value:
        if self.module.called(container).endswith("_range"):
            return INT
        value = self._evaluate(container, scope)
        if value is kinds.NOTHING:
            return kinds.NOTHING
        return STR if value.kind == "str" else value.item or UNKNOWN

    def _evaluate(self, node: ast.AST, scope: Scope) -> Value:
        evaluate: Callable[..., Value] | None = getattr(
            self, "_" + type(node).__name__.lower(), None
        )
        if evaluate is None or self._depth == _DEPTH:
            return UNKNOWN
        self._depth += 1
        try:
            return evaluate(node, scope)
        finally:
            self._depth -= 1

    def _constant(self, node: ast.Constant, scope: Scope) -> Value:
        return kinds.CONSTANTS.get(type(node.value), UNKNOWN)

    def _joinedstr(self, node: ast.JoinedStr, scope: Scope) -> Value:
        return STR

    def _name(self, node: ast.Name, scope: Scope) -> Value:
        name = self.module.nki_name(node)
        if name:
            return Value("nki", name)
        found = self.module.bindings.find(node.id, scope)
        return UNKNOWN if found is None else self._scope(found[0])[node.id]

    def _container(self, kind: str, nodes: list[ast.expr], scope: Scope) -> Value:
        item = kinds.NOTHING
        for node in nodes:
            item = join(item, self._evaluate(node, scope))
        return Value(kind, "", item if item.kind and item is not kinds.NOTHING else None)

    def _list(self, node: ast.List, scope: Scope) -> Value:
        return self._container("list", node.elts, scope)

    def _tuple(self, node: ast.Tuple, scope: Scope) -> Value:
        return self._container("tuple", node.elts, scope)

    def _set(self, node: ast.Set, scope: Scope) -> Value:
        return Value("set")

    def _dict(self, node: ast.Dict, scope: Scope) -> Value:
        return Value("dict")

    def _dictcomp(self, node: ast.DictComp, scope: Scope) -> Value:
        return Value("dict")

    def _listcomp(self, node: ast.ListComp, scope: Scope) -> Value:
        return self._container("list", [node.elt], scope)

    def _ifexp(self, node: ast.IfExp, scope: Scope) -> Value:
        return join(self._evaluate(node.body, scope), self._evaluate(node.orelse, scope))

    def _boolop(self, node: ast.BoolOp, scope: Scope) -> Value:
        found = kinds.NOTHING
        for value in node.values:
            found = join(found, self._evaluate(value, scope))
        return found

    def _compare(self, node: ast.Compare, scope: Scope) -> Value:
        return BOOL

    def _namedexpr(self, node: ast.NamedExpr, scope: Scope) -> Value:
        return self._evaluate(node.value, scope)

    def _unaryop(self, node: ast.UnaryOp, scope: Scope) -> Value:
        value = self._evaluate(node.operand, scope)
        if isinstance(node.op, ast.Not):
            return BOOL
        return INT if value.kind == "bool" else value

    def _binop(self, node: ast.BinOp, scope: Scope) -> Value:
        left, right = self._evaluate(node.left, scope), self._evaluate(node.right, scope)
        if kinds.NOTHING in (left, right):
            return kinds.NOTHING
        for kind in ("tensor", *kinds.RUN_TIME):
            if kind in (left.kind, right.kind):
                return Value(kind)
        if left.kind in kinds.NUMBERS and right.kind in kinds.NUMBERS:
            real = "float" in (left.kind, right.kind) or isinstance(node.op, ast.Div)
            return FLOAT if real else INT
        repeated = left.kind == right.kind or right.kind == "int"
        if left.kind in ("str", *kinds.SEQUENCES) and repeated:
            return join(left, right) if left.kind == right.kind else left
        return UNKNOWN

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Value:
        value = self._evaluate(node.value, scope)
        if value.kind in ("tensor", "str", "nothing"):
            return value
        if value.kind in kinds.SEQUENCES:
            return value if isinstance(node.slice, ast.Slice) else value.item or UNKNOWN
        return UNKNOWN

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Value:
        name = self.module.nki_name(node)
        if name:
            return Value("nki", name)
        value = self._evaluate(node.value, scope)
        if value.kind == "tensor":
            if node.attr in ("shape", "strides"):
                return Value("tuple", "", INT)
            return INT if node.attr in kinds.TENSOR_NUMBERS else UNKNOWN
        return UNKNOWN

    def _call(self, node: ast.Call, scope: Scope) -> Value:
        name = self.module.called(node)
        if name:
            return self._nki_call(name, node)
        if isinstance(node.func, ast.Name):
            if self.module.bindings.find(node.func.id, scope) is None:
                return self._builtin(node, scope)
        elif isinstance(node.func, ast.Attribute):
            value = self._evaluate(node.func.value, scope)
            if value.kind == "tensor" and node.func.attr in kinds.TENSOR_METHODS:
                return value
            if value.kind == "dict" and node.func.attr in ("keys", "items", "values"):
                item = STR if node.func.attr == "keys" else None
                return Value(node.func.attr, "", item)
            if dotted(node.func.value) == "math":
                return INT if node.func.attr in kinds.MATH_INTS else FLOAT
            if dotted(node.func.value) in ("np", "numpy"):
                return Value("numpy")
        return UNKNOWN

    def _builtin(self, node: ast.Call, scope: Scope) -> Value:
        assert isinstance(node.func, ast.Name)
        if node.func.id in ("min", "max", "abs", "sum"):
            found = kinds.NOTHING
            for argument in node.args:
                found = join(found, self._evaluate(argument, scope))
            return found if found.kind in ("int", "float", "nothing") else UNKNOWN
        return kinds.BUILTINS.get(node.func.id, UNKNOWN)

    def _nki_call(self, name: str, node: ast.Call) -> Value:
        if name == "nki.isa.register_alloc":
            return Value("register")
        if name == "nki.isa.scalar_load":
            return Value("scalar")
        short = name.removeprefix("nki.language.")
        if short in kinds.NEW_TENSORS:
            return Value("tensor", kinds.new_buffer(self.module, name, node))
        if short == "load":
            return Value("tensor", "sbuf")
        if short == "shared_constant":
            return Value("tensor", "shared_hbm")
        signature = signatures.signature(name)
        returns = str(signature.return_annotation) if signature is not None else ""
        if "NkiTensor" in returns:
            return Value("tensor")
        return INT if returns in ("int", "<class 'int'>") else UNKNOWN
