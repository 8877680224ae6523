"""Which names of NKI 0.7 the interpreter has, and the test that pins each of them.

`python -m segattn.tests.checks.coverage` writes `docs/nki_coverage.md`; `--check` only compares.
The list of names and signatures is `tests/data/api.json`, kept by hand from the generated API pages
of the Neuron documentation; `since` is the first NeuronCore generation that has a name.
"""

import argparse
import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from segattn.tests.checks.coverage.api_pins import Pins, read_pins

ROOT = Path(__file__).resolve().parents[3]
API_PATH = ROOT / "tests" / "data" / "api.json"
MODULES = (
    *("nki", "nki.isa", "nki.language", "nki.collectives"),
    *("nki.compiler", "nki.simulator"),
)
DOC_PATH = ROOT / "docs" / "nki_coverage.md"
TESTS_PATH = ROOT / "tests" / "nki"
TRN3 = "v4"
_MISSING = object()
_SECTION = re.compile(r"^## (\S+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^\| `(.+?)` \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """One public name: `status` is implemented, trn3-only or missing."""

    module: str
    name: str
    since: str
    status: str
    test: str


@dataclass(frozen=True)
class _Entry:
    """One name of the data file with what the interpreter has under it (or _MISSING)."""

    module: str
    name: str
    data: dict[str, Any]
    found: object
    namespace: ModuleType | None


def load_api(path: Path = API_PATH) -> dict[str, Any]:
    """Return the modules of the data file, by name."""
    modules: dict[str, Any] = json.loads(path.read_text())["modules"]
    return modules


def coverage(api: dict[str, Any], pins: Pins) -> list[Row]:
    """Return one row per function, class, enum member, method, attribute and constant."""
    rows = []
    for entry in _entries(api):
        since = entry.data["since"]
        status = "trn3-only" if since == TRN3 else "implemented"
        if entry.found is _MISSING:
            status = "missing"
        test = "" if status == "missing" else pins.find(entry.module, entry.name)
        rows.append(Row(entry.module, entry.name, since, status, test))
    return rows


def drift(api: dict[str, Any]) -> list[str]:
    """Return one line per implemented signature or enum value that differs from the data."""
    lines = []
    for entry in _entries(api):
        if entry.found is _MISSING:
            continue
        label = f"{entry.module}.{entry.name}"
        if "params" in entry.data:
            lines += _signature_drift(label, entry)
        elif "value" in entry.data and getattr(entry.found, "value", None) != entry.data["value"]:
            lines.append(f"{label}: {entry.found!r}, documented value {entry.data['value']!r}")
    return lines


def _entries(api: dict[str, Any]) -> Iterator[_Entry]:
    for module_name in MODULES:
        contents = api[module_name]
        namespace = _import(module_name)
        for name, data in {**contents["functions"], **contents["constants"]}.items():
            yield _Entry(module_name, name, data, getattr(namespace, name, _MISSING), namespace)
        for name, data in contents["classes"].items():
            owner = getattr(namespace, name, _MISSING)
            yield _Entry(module_name, name, data, owner, namespace)
            for member, child in _members(data):
                found = _MISSING if owner is _MISSING else _member(owner, member)
                yield _Entry(module_name, f"{name}.{member}", child, found, namespace)


def _members(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    since = data["since"]
    for name, value in data.get("enum_members", {}).items():
        yield name, {"value": value, "since": since}
    yield from data.get("methods", {}).items()
    for name in data.get("attributes", ()):
        yield name, {"since": since}


def _member(owner: object, name: str) -> object:
    """Return a class member; an attribute set per instance counts when it is declared."""
    found = getattr(owner, name, _MISSING)
    if found is _MISSING and isinstance(owner, type):
        for base in owner.__mro__:
            if name in inspect.get_annotations(base):
                return base
    return found


def _import(module_name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"segattn.reference.{module_name}")
    except ModuleNotFoundError:
        return None


def _signature_drift(label: str, entry: _Entry) -> list[str]:
    if not callable(entry.found):
        return [f"{label}: not callable"]
    actual = list(inspect.signature(entry.found).parameters.values())
    documented = entry.data["params"]
    names = [parameter.name for parameter in actual]
    if names != [param["name"] for param in documented]:
        return [f"{label}: parameters {names}, documented {[p['name'] for p in documented]}"]
    lines = []
    for parameter, param in zip(actual, documented, strict=True):
        if parameter.kind.name.lower() != param["kind"]:
            lines.append(f"{label}: {parameter.name} is {parameter.kind.name.lower()}")
        if param["default"] == "...":  # the stub does not tell the value
            continue
        default = _default(param["default"], entry.namespace)
        if type(parameter.default) is not type(default) or parameter.default != default:
            lines.append(
                f"{label}: default {parameter.name}={parameter.default!r}, documented {default!r}"
            )
    return lines


def _default(text: str | None, namespace: ModuleType | None) -> object:
    """Evaluate a default as the stub writes it: a literal or a name like `engine.unknown`."""
    if text is None:
        return inspect.Parameter.empty
    try:
        return ast.literal_eval(text)
    except ValueError:
        value: object = namespace
        for part in text.split("."):
            value = getattr(value, part)
        return value


def render(rows: list[Row]) -> str:
    """Return the Markdown page for the rows."""
    counts = dict.fromkeys(("implemented", "trn3-only", "missing"), 0)
    for row in rows:
        counts[row.status] += 1
    lines = [
        "# NKI 0.7 coverage of the interpreter",
        "",
        "Written by `python -m segattn.tests.checks.coverage`, and a test fails when it is stale.",
        "`since` is the first NeuronCore generation with the name (v3 is Trainium2). A trn3-only",
        "name raises an error that says so. The test is the most specific one that uses the name.",
        "",
        ", ".join(f"{count} {status}" for status, count in counts.items()),
    ]
    for module in MODULES:
        lines += ["", f"## {module}", "", "| name | since | status | test |", "|---|---|---|---|"]
        lines += [
            f"| `{row.name}` | {row.since} | {row.status} | {row.test} |"
            for row in rows
            if row.module == module
        ]
    return "\n".join(lines) + "\n"


def stale_rows(page: str, rows: list[Row], pins: Pins) -> list[str]:
    """Return one line per name that the page has wrong.

    The test that the page names must use the name; that a more specific one was added is no fault.
    """
    written = {
        (module, name): (since, status, test)
        for module, table in re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", page, re.M | re.S)
        for name, since, status, test in re.findall(
            r"^\| `(.+?)` \| (.*?) \| (.*?) \| (.*?) \|$", table, re.M
        )
    }
    lines = []
    for row in rows:
        label = f"{row.module}.{row.name}"
        since, status, test = written.pop((row.module, row.name), ("", "not in the page", ""))
        users = [user.label for user in pins.users(row.module, row.name)]
        if (since, status) != (row.since, row.status):
            lines.append(f"{label}: {status}, is {row.status}")
        elif test not in (users or [""]):
            lines.append(f"{label}: {test or 'no test'} does not use it")
    return lines + [f"{module}.{name}: does not exist" for module, name in written]


def main(argv: list[str] | None = None) -> int:
    """Write the page; with --check exit 1 when it is out of date or a signature drifts."""
    parser = argparse.ArgumentParser(prog="segattn.tests.checks.coverage", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args(argv)
    api = load_api()
    pins = read_pins(TESTS_PATH)
    rows = coverage(api, pins)
    page = render(rows)
    problems = drift(api)
    if args.check:
        problems += stale_rows(DOC_PATH.read_text() if DOC_PATH.is_file() else "", rows, pins)
    else:
        DOC_PATH.parent.mkdir(exist_ok=True)
        DOC_PATH.write_text(page)
    print("\n".join(problems) or page.splitlines()[6])
    return 1 if problems else 0
