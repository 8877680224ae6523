"""Rules that only compilers and devices have taught: one table, one file for each idea.

`field_rules.toml` holds what is known of each: what happens, error codes, versions, source,
confidence, our level, the legal twin. `python -m segattn.reference.nki.rules` prints it as
docs/field_rules.md, `... rules NCC_IBIR092` explains an error code.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True)
class FieldRule:
    """One row of the table.

    `level` is the default of a rule of `nki.strict`, "" where `enforced` names what refuses the
    construct instead: an older rule of `nki.strict`, or "always" for a documented limit.
    """

    name: str
    what: str
    happens: str
    seen: str
    source: str
    confidence: str
    twin: str
    level: str = ""
    enforced: str = ""
    codes: tuple[str, ...] = ()


def _read() -> tuple[FieldRule, ...]:
    text = (Path(__file__).parent / "field_rules.toml").read_text(encoding="utf-8")
    return tuple(
        FieldRule(**{**row, "codes": tuple(row.get("codes", ()))})
        for row in tomllib.loads(text)["rule"]
    )


TABLE: Final = _read()
FIELD_RULES: Final[dict[str, FieldRule]] = {row.name: row for row in TABLE if row.level}
"""The rows that are rules of `nki.strict`, by name."""


def label(rule: str) -> str:
    """How a message names a rule: with the codes of the compiler or device, if there are any."""
    found = FIELD_RULES.get(rule)
    return ", ".join((rule, *found.codes)) if found else rule


def explain(code: str) -> list[FieldRule]:
    """The rows that an error code (NCC_...) or a rule's name stands for."""
    return [row for row in TABLE if code in (row.name, *row.codes)]
