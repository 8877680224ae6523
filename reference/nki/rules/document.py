"""The table as a document."""

from __future__ import annotations

from typing import Final

from . import TABLE

_HEAD: Final = """# Rules from the field

What compilers and devices refuse or get wrong although documents and AWS's simulator are silent,
as people who own devices have published it. The interpreter checks all of it. The command
`python -m segattn.reference.nki.rules` prints this file from `field_rules.toml` beside it; with an
error code or the name of a rule, it explains that one.

A level of `warn` or `error` is the default of a rule of `nki.strict`. `nki.strict(field="error")`
sets all of them at once; a rule named beside it keeps its own level. `always` is a documented limit
that cannot be switched off; another name is the rule of [interpreter.md](interpreter.md) that finds
it. Rules that one project has reported warn; those are errors that AWS documents or confirms, or
that no reading makes right.

| rule | refused | what happens | code | seen with | source | confidence | level | legal instead |
|---|---|---|---|---|---|---|---|---|
"""


def document() -> str:
    """docs/field_rules.md."""
    rows = [
        f"| `{row.name}` | {row.what} | {row.happens} | {', '.join(row.codes) or '-'} | "
        f"{row.seen} | {row.source} | {row.confidence} | {row.level or row.enforced} | "
        f"{row.twin} |\n"
        for row in TABLE
    ]
    return _HEAD + "".join(rows)
