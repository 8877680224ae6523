"""`segattn lint FILE...`."""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from .check import lint_files
from .finding import Finding
from .sources import files


def main(argv: list[str] | None = None) -> int:
    """Print one line per finding.

    Folders are searched for Python files and notebooks. `--level 1` leaves out the warnings of
    level 2; information, which is no complaint, is counted apart and shown with `--information`.
    `--json` prints one object with the lists "findings" and "information" instead.

    Returns 1 if level 1 has findings, else 0; ends with status 2 if a file cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="segattn lint",
        description="Lint NKI kernels.",
        epilog="Exit status: 0 no findings of level 1, 1 findings of level 1, 2 unreadable files.",
    )
    parser.add_argument("paths", type=Path, nargs="+", metavar="FILE", help="files or folders")
    parser.add_argument("--level", type=int, choices=(1, 2), default=2, help="highest level shown")
    parser.add_argument("--information", action="store_true", help="show information too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    paths = dict.fromkeys(file for path in args.paths for file in _files(parser, path))
    try:
        findings = lint_files(paths)
    except OSError as error:
        parser.error(f"{error.filename} cannot be read: {error.strerror}")
    shown = [item for item in findings if 1 <= item.kind.level <= args.level]
    information = [item for item in findings if item.kind.level == 0]
    if args.json:
        lists = {"findings": shown, "information": information}
        print(json.dumps({key: [_fields(i) for i in items] for key, items in lists.items()}))
    else:
        for finding in findings:
            if 1 <= finding.kind.level <= args.level or (
                args.information and not finding.kind.level
            ):
                print(finding)
    counts = Counter(finding.kind.level for finding in findings)
    summary = f"{counts[1]} at level 1, {counts[2]} at level 2, {counts[0]} for information"
    print(summary, file=sys.stderr)
    return 1 if counts[1] else 0


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


def _fields(finding: Finding) -> dict[str, str | int]:
    return {
        "path": finding.path,
        "line": finding.line,
        "column": finding.column,
        "level": finding.kind.level,
        "kind": finding.kind.value,
        "rule": finding.rule,
        "message": finding.message,
        "replacement": finding.replacement,
    }
