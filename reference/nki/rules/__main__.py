"""Print the table as docs/field_rules.md, or the rows of an error code or rule name."""

import sys

from . import FieldRule, explain
from .document import document


def _shown(row: FieldRule) -> str:
    return (
        f"{row.name} ({', '.join(row.codes) or 'no code'})\n  refused: {row.what}\n"
        f"  happens: {row.happens}\n  seen: {row.seen}; {row.source} ({row.confidence})\n"
        f"  instead: {row.twin}"
    )


if len(sys.argv) == 1:
    print(document(), end="")
else:
    found = [row for code in sys.argv[1:] for row in explain(code)]
    print("\n".join(map(_shown, found)) or f"nothing is known of {' '.join(sys.argv[1:])}")
    sys.exit(0 if found else 1)
