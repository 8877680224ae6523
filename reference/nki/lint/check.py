"""Runs the rules over source files."""

import ast
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from .bindings import FUNCTION_TYPES, Function
from .finding import Finding, Kind
from .module import Module
from .project import Project
from .rules import OF_FILES, OF_FUNCTIONS
from .scope import File, Scope
from .sources import Source, read


def lint_source(source: str, path: str = "<source>") -> list[Finding]:
    """Return all findings in the kernel code of a source text, in order of lines."""
    return _lint([Source(path, source)])


def lint_file(path: str | Path) -> list[Finding]:
    """Return all findings in the kernel code of a file."""
    return lint_files([path])


def lint_files(paths: Iterable[str | Path]) -> list[Finding]:
    """Return all findings in files, by file and line.

    What a file's kernels call in another one of these files is kernel code there, too.
    """
    return _lint([read(path) for path in paths])


def _lint(sources: list[Source]) -> list[Finding]:
    project = Project()
    findings: list[Finding] = []
    modules: list[Module] = []
    for source in sources:
        try:
            modules.append(Module(source.path, source.text()))
        except (SyntaxError, ValueError, RecursionError) as error:
            findings.append(_not_python(source.path, error))
        else:
            project.add(modules[-1])
    for module, functions in _kernel_code(project, modules).items():
        file = File(module)
        found = {item for rule in OF_FILES for item in rule(file)}
        for function in functions:
            scope = Scope(file, function)
            found |= {item for rule in OF_FUNCTIONS for item in rule(scope)}
        findings += found
    order = {source.path: position for position, source in enumerate(sources)}
    findings.sort(key=lambda x: (order[x.path], x.line, x.column, x.rule, x.message))
    return [_placed(item, sources[order[item.path]]) for item in findings]


def _placed(finding: Finding, source: Source) -> Finding:
    path, line = source.place(finding.line)
    return replace(finding, path=path, line=line)


def _not_python(path: str, error: Exception) -> Finding:
    line, column = 1, 1
    text = str(error) or type(error).__name__
    if isinstance(error, SyntaxError):
        line, column, text = error.lineno or 1, error.offset or 1, error.msg
    elif isinstance(error, UnicodeDecodeError):
        line = error.object.count(b"\n", 0, error.start) + 1
        text = f"{error.reason} in {error.encoding}; save it as UTF-8 or name its encoding"
    message = f"not Python 3: {text}"
    return Finding(path, line, max(column, 1), "syntax", Kind.SYNTAX, message)


def _kernel_code(project: Project, modules: list[Module]) -> dict[Module, list[Function]]:
    """Return the kernel code of every file, with what kernels of the other files call."""
    code = {module: list(module.device_functions) for module in modules}
    queue = [(module, function) for module in modules for function in code[module]]
    seen = set(queue)
    while queue:
        module, function = queue.pop()
        for node in module.code_nodes(function):
            if not isinstance(node, ast.Name):
                continue
            if module.imported(node.id, module.scope_of(node)) is None or module.nki_name(node):
                continue
            for owner, item in project.definitions(module, node.id, module.scope_of(node)):
                if owner not in code:
                    continue
                roots = [item] if isinstance(item, FUNCTION_TYPES) else owner.methods(item)
                new = [(owner, root) for root in owner.reach(roots) if (owner, root) not in seen]
                seen.update(new)
                queue += new
                code[owner] += [root for _, root in new]
    return {module: sorted(found, key=lambda node: node.lineno) for module, found in code.items()}
