"""`segattn lint FILE...`."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from .check import lint_files
from .finding import Finding
from .rules import NAMES
from .sources import files

_LEVELS = ("error", "warning", "off")


def main(argv: list[str] | None = None) -> int:
    """Print one line per finding, or with `--json` one list of objects.

    Folders are searched for Python files and notebooks. What NKI refuses is an error, what it
    deprecates a warning; `--level RULE=LEVEL` takes a rule otherwise and `--ignore RULE` is short
    for `--level RULE=off`.

    Returns 1 if there are errors, else 0; ends with status 2 if a file cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="segattn lint",
        description="Lint NKI kernels.",
        epilog="Exit status: 0 no errors, 1 errors, 2 unreadable files. Rules: " + ", ".join(NAMES),
    )
    parser.add_argument("paths", type=Path, nargs="+", metavar="FILE", help="files or folders")
    parser.add_argument(
        "--ignore", action="append", default=[], choices=NAMES, metavar="RULE", help="drop a rule"
    )
    parser.add_argument(
        "--level",
        action="append",
        default=[],
        metavar="RULE=LEVEL",
        help=f"level of a rule: {', '.join(_LEVELS)}",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    levels = dict.fromkeys(args.ignore, "off") | dict(_level(parser, x) for x in args.level)
    paths = dict.fromkeys(file for path in args.paths for file in _files(parser, path))
    try:
        findings = lint_files(paths)
    except OSError as error:
        parser.error(f"{error.filename} cannot be read: {error.strerror}")
    shown = [(item, level) for item in findings if (level := _of(item, levels)) != "off"]
    if args.json:
        print(json.dumps([_fields(item, level) for item, level in shown]))
    else:
        for item, level in shown:
            print(f"{item} ({level})")
    counts = Counter(level for _, level in shown)
    print(f"{counts['error']} errors, {counts['warning']} warnings", file=sys.stderr)
    return 1 if counts["error"] else 0


def _level(parser: argparse.ArgumentParser, text: str) -> tuple[str, str]:
    """Return rule and level of `RULE=LEVEL`; ends the program if one of them does not exist."""
    rule, _, level = text.partition("=")
    if rule not in NAMES or level not in _LEVELS:
        parser.error(
            f"--level {text}: allowed are RULE=LEVEL with a level of {', '.join(_LEVELS)} and a "
            f"rule of {', '.join(NAMES)}"
        )
    return rule, level


def _of(finding: Finding, levels: Mapping[str, str]) -> str:
    return levels.get(finding.rule, "error" if finding.kind.fails else "warning")


def _files(parser: argparse.ArgumentParser, path: Path) -> list[Path]:
    """Return the files to lint at a path; ends the program if there are none."""
    if not path.exists():
        parser.error(f"{path} does not exist")
    if not path.is_dir():
        return [path]
    found = files(path)
    if not found:
        parser.error(f"{path} has no Python file or notebook")
    return found


def _fields(finding: Finding, level: str) -> dict[str, str | int]:
    return {
        "path": finding.path,
        "line": finding.line,
        "column": finding.column,
        "level": level,
        "kind": finding.kind.value,
        "rule": finding.rule,
        "message": finding.message,
        "replacement": finding.replacement,
    }
