"""The functions that run as bodies of nl.fori_loop and nl.while_loop, also through helpers."""

import ast
from collections.abc import Iterator

from .bindings import FUNCTION_TYPES, Function
from .module import Module
from .nki_names import dotted
from .project import Project

# name -> position of the body
DYNAMIC_LOOPS = {"nki.language.fori_loop": 2, "nki.language.while_loop": 1}


class Loops:
    """Finds loop bodies: functions given to a dynamic loop, or to a helper that passes them on."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._passed_on: dict[Function, dict[str, str]] = {}
        self._bodies: dict[Module, dict[Function, str]] = {}

    def bodies(self, module: Module) -> dict[Function, str]:
        """Return the functions of a file that are loop bodies: function to name of the loop."""
        if module not in self._bodies:
            found: dict[Function, str] = {}
            for node in module.bindings.scope_of:
                if isinstance(node, ast.Call):
                    for argument, loop in self._body_arguments(module, node, frozenset()):
                        for function in _functions(module, argument):
                            found[function] = loop
            self._bodies[module] = found
        return self._bodies[module]

    def _body_arguments(
        self, module: Module, call: ast.Call, parameters: frozenset[str]
    ) -> Iterator[tuple[ast.expr, str]]:
        """Yield the arguments of a call that run as a loop's body, with the name of the loop.

        Arguments are functions of the file, or among `parameters` of the function that calls.
        """
        name = module.called(call)
        if name in DYNAMIC_LOOPS:
            position = DYNAMIC_LOOPS[name]
            arguments = call.args[position : position + 1]
            arguments += [item.value for item in call.keywords if item.arg == "body_fun"]
            for argument in arguments:
                yield argument, name.rpartition(".")[2]
        elif not name and any(
            _may_be_function(module, item, parameters) for item in _arguments(call)
        ):
            callees = list(self._callees(module, call))
            for position, argument in enumerate(call.args):
                yield from self._agreed(callees, argument, position, "")
            for keyword in call.keywords:
                yield from self._agreed(callees, keyword.value, -1, keyword.arg or "")

    def _agreed(
        self, callees: list[tuple[Module, Function, int]], argument: ast.expr, at: int, name: str
    ) -> Iterator[tuple[ast.expr, str]]:
        """Yield the argument if every function that may be called passes it on to a loop."""
        loops = set()
        for module, function, skipped in callees:
            parameters = [*function.args.posonlyargs, *function.args.args]
            position = at + skipped
            if at >= 0:
                name = parameters[position].arg if position < len(parameters) else ""
            loops.add(self._passes_on(module, function).get(name, ""))
        if len(loops) == 1 and "" not in loops:
            yield argument, loops.pop()

    def _callees(self, module: Module, call: ast.Call) -> Iterator[tuple[Module, Function, int]]:
        """Yield the functions that a call may mean, with the parameters bound before."""
        if isinstance(call.func, ast.Name):
            for owner, item in self.project.definitions(
                module, call.func.id, module.scope_of(call)
            ):
                if isinstance(item, FUNCTION_TYPES):
                    yield owner, item, 0
        elif isinstance(call.func, ast.Attribute):
            base = call.func.value
            if isinstance(base, ast.Name):
                imported = module.imported(base.id, module.scope_of(call))
                found = self.project.file(module, imported) if imported is not None else None
                if found is not None and not found[1]:
                    function = found[0].functions.get(call.func.attr)
                    if function is not None:
                        yield found[0], function, 0
                    return
            for owner, method in self.project.methods(module, call.func.attr):
                static = any(dotted(item) == "staticmethod" for item in method.decorator_list)
                yield owner, method, 0 if static else 1

    def _passes_on(self, module: Module, function: Function) -> dict[str, str]:
        """Return the parameters that a function gives to a dynamic loop, with the loop's name."""
        if function not in self._passed_on:
            self._passed_on[function] = {}
            args = function.args
            every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
            parameters = frozenset(arg.arg for arg in every)
            found = {}
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    for argument, loop in self._body_arguments(module, node, parameters):
                        if isinstance(argument, ast.Name) and argument.id in parameters:
                            found[argument.id] = loop
            self._passed_on[function] = found
        return self._passed_on[function]


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(item.value for item in call.keywords)]


def _may_be_function(module: Module, node: ast.expr, parameters: frozenset[str]) -> bool:
    if isinstance(node, ast.Name) and node.id in parameters:
        return True
    return next(_functions(module, node), None) is not None


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
