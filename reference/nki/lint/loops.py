"""The functions that run as bodies of nl.fori_loop and nl.while_loop."""

import ast
from collections.abc import Iterator

from .bindings import FUNCTION_TYPES, Function
from .module import Module
from .nki_names import dotted

# name -> position of the body
DYNAMIC_LOOPS = {"nki.language.fori_loop": 2, "nki.language.while_loop": 1}


def loop_bodies(module: Module) -> dict[Function, str]:
    """Return the functions of a file that it gives to a dynamic loop: function to loop's name.

    Given is a function by its name or another one, a conditional, a functools.partial, or what a
    function of the file returns.
    """
    found: dict[Function, str] = {}
    for node in module.bindings.scope_of:
        if isinstance(node, ast.Call) and (name := module.called(node)) in DYNAMIC_LOOPS:
            position = DYNAMIC_LOOPS[name]
            given = node.args[position : position + 1]
            given += [item.value for item in node.keywords if item.arg == "body_fun"]
            for argument in given:
                for function in _functions(module, argument):
                    found[function] = name.rpartition(".")[2]
    return found


def _functions(
    module: Module, node: ast.expr, seen: frozenset[str] = frozenset()
) -> Iterator[Function]:
    """Yield the functions of the file that an argument may be."""
    if isinstance(node, ast.Name) and node in module.bindings.scope_of and node.id not in seen:
        found = module.bindings.find(node.id, module.scope_of(node))
        for value in found[1] if found else ():
            if isinstance(value, FUNCTION_TYPES):
                yield value
            elif isinstance(value, ast.expr):
                yield from _functions(module, value, seen | {node.id})
    elif isinstance(node, ast.IfExp):
        yield from _functions(module, node.body, seen)
        yield from _functions(module, node.orelse, seen)
    elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "partial":
        for argument in node.args[:1]:
            yield from _functions(module, argument, seen)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        for factory in _functions(module, node.func, seen):
            for child in ast.walk(factory):
                if isinstance(child, ast.Return) and isinstance(child.value, ast.Name):
                    for item in module.bindings.definitions(child.value.id, factory):
                        if isinstance(item, FUNCTION_TYPES) and module.scope_of(item) is factory:
                            yield item
