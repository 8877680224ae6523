"""`segattn lint FILE...`."""

import argparse
import sys
from collections import Counter
from pathlib import Path

from .check import lint_file
from .finding import Finding


def main(argv: list[str] | None = None) -> int:
    """Print one line per finding; the exit status is 1 if level 1 has any.

    Folders are searched for *.py. `--level 1` leaves out the warnings of level 2,
    `--information` adds what is no complaint.
    """
    parser = argparse.ArgumentParser(prog="segattn lint", description="Lint NKI kernels.")
    parser.add_argument("paths", type=Path, nargs="+", metavar="FILE", help="files or folders")
    parser.add_argument("--level", type=int, choices=(1, 2), default=2, help="highest level shown")
    parser.add_argument("--information", action="store_true", help="show information too")
    args = parser.parse_args(argv)
    findings: list[Finding] = []
    for path in args.paths:
        if not path.exists():
            parser.error(f"{path} does not exist")
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            findings += lint_file(file)
    lowest = 0 if args.information else 1
    shown = [finding for finding in findings if lowest <= finding.kind.level <= args.level]
    for finding in shown:
        print(finding)
    counts = Counter(finding.kind.level for finding in findings)
    print(f"{counts[1]} at level 1, {counts[2]} at level 2", file=sys.stderr)
    return 1 if counts[1] else 0
