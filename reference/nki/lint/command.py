"""Check NKI kernels against the language and its rules.

Folders are searched for Python files and notebooks. What NKI refuses is an error, what it
deprecates a warning; `--level RULE=LEVEL` takes a rule otherwise and `--ignore RULE` is short for
`--level RULE=off`.
"""

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from .check import lint_files
from .finding import Finding
from .rules import NAMES
from .sources import files

_LEVELS = ("error", "warning", "off")


def add_arguments(parser: ArgumentParser) -> None:
    """Files and the levels of rules."""
    parser.add_argument("paths", type=Path, nargs="+", metavar="FILE", help="files or folders")
    parser.add_argument(
        "--ignore", action="append", default=[], choices=NAMES, metavar="RULE", help="drop a rule"
    )
    parser.add_argument(
        "--level",
        action="append",
        default=[],
        type=_level,
        metavar="RULE=LEVEL",
        help=f"level of a rule: {', '.join(_LEVELS)}; rules: {', '.join(NAMES)}",
    )


def run(options: Namespace) -> int:
    """Print one line per finding, or with --json one list of objects; 1 if there are errors."""
    levels = dict.fromkeys(options.ignore, "off") | dict(options.level)
    findings = lint_files(dict.fromkeys(file for path in options.paths for file in _files(path)))
    shown = [(item, level) for item in findings if (level := _of(item, levels)) != "off"]
    if options.json:
        print(json.dumps([_fields(item, level) for item, level in shown]))
    else:
        for item, level in shown:
            print(f"{item} ({level})")
    counts = Counter(level for _, level in shown)
    print(f"{counts['error']} errors, {counts['warning']} warnings", file=sys.stderr)
    return 1 if counts["error"] else 0


def _level(text: str) -> tuple[str, str]:
    """Rule and level of `RULE=LEVEL`. ArgumentTypeError if one of them does not exist."""
    rule, _, level = text.partition("=")
    if rule not in NAMES or level not in _LEVELS:
        raise ArgumentTypeError(
            f"{text}: allowed are RULE=LEVEL with a level of {', '.join(_LEVELS)} and a "
            f"rule of {', '.join(NAMES)}"
        )
    return rule, level


def _of(finding: Finding, levels: Mapping[str, str]) -> str:
    return levels.get(finding.rule, "error" if finding.kind.fails else "warning")


def _files(path: Path) -> list[Path]:
    """The files to lint at a path. ValueError if there are none."""
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if not path.is_dir():
        return [path]
    found = files(path)
    if not found:
        raise ValueError(f"{path} has no Python file or notebook")
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
