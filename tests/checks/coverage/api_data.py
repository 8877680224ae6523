"""Reads the API stubs in the public NKI documentation into `tests/data/api.json`.

`python -m segattn.tests.checks.coverage.api_data STUBS` with STUBS = `nki/api/nki` of a checkout of
aws-neuron/aws-neuron-sdk. The result names every public function, class and constant with its
signature, and the first NeuronCore generation that has it (`since`).
"""

import argparse
import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

API_PATH = Path(__file__).resolve().parents[2] / "data" / "api.json"
MODULES = {
    "nki": "",
    "nki.isa": "isa",
    "nki.language": "language",
    "nki.collectives": "collectives",
}
FIRST_GENERATION = "v2"

# How the docstrings say that a whole name, not one of its options, needs a generation.
_AVAILABILITY = re.compile(
    r"Available (?:only )?on NeuronCore-(v\d)[^.]*(?:newer|later)"
    r"|Supported arch versions: NeuronCore-(v\d)\+"
    r"|custom data type for .* on NeuronCore-(v\d)"
)


def since(docstring: str) -> str:
    """Return the generation a docstring names for the whole entry, else the first one."""
    found = _AVAILABILITY.search(docstring)
    if found is None:
        return FIRST_GENERATION
    return next(group for group in found.groups() if group)


def read_stubs(stubs: Path) -> dict[str, Any]:
    """Return the contents of api.json for the stub package at `stubs`.

    Raises FileNotFoundError if one of the four modules is not there.
    """
    modules = {
        name: _read_module((stubs / folder / "__init__.py").read_text())
        for name, folder in MODULES.items()
    }
    return {"modules": modules}


def _read_module(source: str) -> dict[str, Any]:
    functions: dict[str, Any] = {}
    classes: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for node, doc in _documented(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = _function(node)
        elif isinstance(node, ast.ClassDef):
            classes[node.name] = _class(node)
        elif name := _assigned_name(node):
            constants[name] = {"since": since(doc)}
    return {"functions": functions, "classes": classes, "constants": constants}


def _documented(body: list[ast.stmt]) -> list[tuple[ast.stmt, str]]:
    """Pair every statement with the string that follows it: how stubs document constants."""
    pairs = []
    for node, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        doc = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            doc = str(following.value.value)
        pairs.append((node, doc))
    return pairs


def _assigned_name(node: ast.stmt) -> str:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return ""


def _function(node: ast.FunctionDef) -> dict[str, Any]:
    return {"params": _params(node.args), "since": since(ast.get_docstring(node) or "")}


def _params(args: ast.arguments) -> list[dict[str, Any]]:
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
    defaults += args.defaults
    params = [
        {
            "name": arg.arg,
            "kind": "positional_or_keyword",
            "default": default and ast.unparse(default),
        }
        for arg, default in zip(positional, defaults, strict=True)
    ]
    for star, kind in ((args.vararg, "var_positional"), (args.kwarg, "var_keyword")):
        if star is not None:
            params.append({"name": star.arg, "kind": kind, "default": None})
    return params


def _class(node: ast.ClassDef) -> dict[str, Any]:
    bases = [ast.unparse(base) for base in node.bases]
    entry: dict[str, Any] = {"bases": bases, "since": since(ast.get_docstring(node) or "")}
    if "Enum" in bases:
        entry["enum_members"] = {
            name: ast.literal_eval(child.value)
            for child in node.body
            if isinstance(child, ast.Assign) and (name := _assigned_name(child))
        }
        return entry
    methods: dict[str, Any] = {}
    attributes: list[str] = []
    for child in node.body:
        if isinstance(child, ast.FunctionDef):
            if any(ast.unparse(decorator) == "property" for decorator in child.decorator_list):
                attributes.append(child.name)
            else:
                methods[child.name] = _function(child)
        elif name := _assigned_name(child):
            attributes.append(name)
    return {**entry, "methods": methods, "attributes": attributes}


def main(argv: list[str] | None = None) -> int:
    """Write `tests/data/api.json` from the stubs named on the command line."""
    parser = argparse.ArgumentParser(
        prog="segattn.tests.checks.coverage.api_data", description=__doc__
    )
    parser.add_argument("stubs", type=Path, help="the folder nki/api/nki of aws-neuron-sdk")
    parser.add_argument("--out", type=Path, default=API_PATH)
    args = parser.parse_args(argv)
    data = {"source": "API stubs of the NKI 0.6.0 documentation", **read_stubs(args.stubs)}
    args.out.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
