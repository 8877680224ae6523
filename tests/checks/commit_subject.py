"""The commit-msg hook: one prefix, one change, at most 72 characters."""

import re
import sys
from pathlib import Path

PREFIXES = ("feat", "fix", "perf", "refactor", "test", "docs")


def problem(subject: str) -> str | None:
    """What is wrong with a subject; None if nothing is."""
    if not re.match(rf"({'|'.join(PREFIXES)}): \S", subject):
        return f"must start with one of {', '.join(PREFIXES)} and a colon"
    if len(subject) > 72:
        return f"has {len(subject)} characters, at most 72 are allowed"
    if "; " in subject:
        return "names more than one change"
    return None


if __name__ == "__main__":
    subject = Path(sys.argv[1]).read_text(encoding="utf-8").partition("\n")[0]
    if found := problem(subject):
        sys.exit(f"commit subject {subject!r} {found}")
