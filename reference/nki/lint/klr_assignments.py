"""Level 2: assignments as the open KLR front end takes them."""

import ast
from collections.abc import Iterator

from .finding import Finding
from .scope import Rule, Scope, literal_int

_STORES = (ast.Attribute, ast.Subscript)
_ALIASING = (ast.Assign, ast.Call, ast.Tuple, ast.List, ast.Dict, ast.Return, ast.keyword)


def targets(scope: Scope) -> Iterator[Finding]:
    """Assignment targets beyond plain names, flat tuples and one element."""
    for node in scope.nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _target(scope, target, node.value)
            stores = sum(isinstance(target, _STORES) for target in node.targets)
            if stores > 1:
                message = "two stores in one statement are rejected"
                yield scope.warn("assign-target", node, message, "one statement per store")
            elif stores and len(node.targets) > 1 and _calls(node.value):
                message = f"{ast.unparse(node.value)} runs once per target"
                yield scope.warn("repeated-evaluation", node, message, "a variable for the value")
        elif isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
            yield from _target(scope, node.target, node.value)


def _calls(node: ast.AST) -> bool:
    return any(isinstance(child, ast.Call) for child in ast.walk(node))


def _target(scope: Scope, target: ast.expr, value: ast.expr) -> Iterator[Finding]:
    if isinstance(target, ast.List):
        yield scope.warn("assign-target", target, "a list as a target is rejected", "a tuple")
    elif isinstance(target, ast.Tuple):
        yield from _tuple(scope, target, value)
    elif isinstance(target, ast.Attribute):
        if not isinstance(target.value, ast.Name):
            message = f"{ast.unparse(target)}: the object of a store must be a plain variable"
            use = f"t = {ast.unparse(target.value)}, then t.{target.attr} = ..."
            yield scope.warn("assign-target", target, message, use)
        elif scope.value(target.value).kind == "class":
            message = f"{ast.unparse(target)}: attributes of classes do not change"
            yield scope.warn("assign-target", target, message, "an attribute of an object")
    elif isinstance(target, ast.Subscript):
        yield from _subscript(scope, target, value)


def _tuple(scope: Scope, target: ast.Tuple, value: ast.expr) -> Iterator[Finding]:
    for item in target.elts:
        if isinstance(item, ast.Tuple | ast.List):
            message = "nested unpacking is rejected"
            yield scope.warn("assign-target", item, message, "flat unpacking, twice")
        elif isinstance(item, ast.Starred):
            yield scope.warn("star", item, "star in a target is rejected", "slices")
        elif not isinstance(item, ast.Name):
            message = "only plain names can be unpacked into"
            yield scope.warn("assign-target", item, message, "one statement per target")
    if isinstance(value, ast.Tuple | ast.List):
        given = len(value.elts)
        starred = any(isinstance(item, ast.Starred) for item in [*target.elts, *value.elts])
        if given != len(target.elts) and not starred:
            message = f"{given} values for {len(target.elts)} names are not refused"
            yield scope.warn("assign-target", target, message, "as many names as values")


def _subscript(scope: Scope, target: ast.Subscript, value: ast.expr) -> Iterator[Finding]:
    items = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
    kind = scope.value(target.value).kind
    if kind == "tensor":
        if not scope.module.called(value).startswith("nki.isa."):
            message = f"assignment to the tensor {ast.unparse(target)} is rejected"
            use = "nisa.tensor_copy, nisa.memset or nisa.dma_copy with it as dst"
            yield scope.warn("tensor-store", target, message, use)
    elif any(isinstance(item, ast.Slice) for item in items):
        message = f"assignment to the slice {ast.unparse(target)} is rejected"
        yield scope.warn("slice-store", target, message, "one element at a time")
    elif (literal_int(target.slice) or 0) < 0:
        message = "negative index in a store is rejected"
        yield scope.warn("negative-store", target, message, "a non-negative index")


def repeated_operands(scope: Scope) -> Iterator[Finding]:
    """`a[f()] += 1` evaluates the index twice."""
    for node in scope.of(ast.AugAssign):
        if isinstance(node.target, _STORES) and _calls(node.target):
            message = f"{ast.unparse(node.target)} is evaluated twice"
            use = "a variable for what is called"
            yield scope.warn("repeated-evaluation", node, message, use)


def in_place_lists(scope: Scope) -> Iterator[Finding]:
    """`l += [x]` makes a new list; another name of the list does not see it."""
    for node in scope.of(ast.AugAssign):
        lists = isinstance(node.value, ast.List) or scope.value(node.target).kind == "list"
        if isinstance(node.op, ast.Add) and lists and _is_shared(scope, node.target):
            message = f"{ast.unparse(node.target)} += ... makes a new list"
            yield scope.warn("list-append", node, message, "append or extend")


def _is_shared(scope: Scope, target: ast.expr) -> bool:
    """Whether a list may have another name: a parameter, an attribute, or stored elsewhere."""
    if not isinstance(target, ast.Name):
        return True
    if target.id in scope.parameters:
        return True
    return any(
        node.id == target.id
        and isinstance(node.ctx, ast.Load)
        and isinstance(scope.parent(node), _ALIASING)
        and not (isinstance(scope.parent(node), ast.Call) and _is_pure(scope.parent(node)))
        and not isinstance(scope.parent(node), ast.Return)
        for node in scope.of(ast.Name)
    )


def _is_pure(call: ast.AST) -> bool:
    return isinstance(call, ast.Call) and ast.unparse(call.func) in ("len", "print", "tuple")


def annotations(scope: Scope) -> Iterator[Finding]:
    """The annotation of a variable is looked up like code: its class must be an NKIObject."""
    for node in scope.of(ast.AnnAssign):
        for child in ast.walk(node.annotation):
            cls = scope.module.class_of(child)
            bases = [ast.unparse(base).split(".")[-1] for base in cls.bases] if cls else []
            if cls is not None and not set(bases) & {"NKIObject", "Enum"}:
                message = f"class {cls.name} of the annotation is gathered and rejected"
                yield scope.warn("annotation-class", child, message, "no annotation")


def with_blocks(scope: Scope) -> Iterator[Finding]:
    """`with nl.no_reorder():` takes no name, no argument and no second manager."""
    for node in scope.of(ast.With):
        bare = len(node.items) == 1 and node.items[0].optional_vars is None
        manager = node.items[0].context_expr
        called = isinstance(manager, ast.Call) and not (manager.args or manager.keywords)
        if not (bare and called) and scope.module.called(manager) == "nki.language.no_reorder":
            message = "no_reorder takes no argument, no name and no other manager beside it"
            yield scope.warn("with", node, message, "with nl.no_reorder():")


RULES: tuple[Rule, ...] = (targets, repeated_operands, in_place_lists, annotations, with_blocks)
