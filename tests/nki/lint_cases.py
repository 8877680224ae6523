"""Reads the lint's cases in tests/data/lint: a wrong snippet and a right one per rule.

A case is `== RULE -> part of the replacement`, the wrong snippet with its line marked `# here`,
`-- right` and the right snippet. Snippets are bodies of a kernel with arguments x and n, or whole
files where the heading says `== file RULE`. The constructs in tests/data/lint/front_end are
`== CONSTRUCT -> VERDICT` and a snippet.
"""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from segattn.reference.nki.lint import Finding, lint_source

FOLDER = Path(__file__).resolve().parents[1] / "data" / "lint"
HEADER = """
import math
import numpy as np
from dataclasses import dataclass, field
from enum import Enum

import nki
import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject

"""
KERNEL = "@nki.jit\ndef kernel(x, n):\n"


@dataclass(frozen=True)
class Case:
    """`wrong` and `right` are whole sources; `line` is where `rule` is to be reported."""

    rule: str
    replacement: str
    wrong: str
    right: str
    line: int

    def __str__(self) -> str:
        return f"{self.rule}:{self.line}"


def read_cases(name: str) -> list[Case]:
    """Return the cases of `tests/data/lint/NAME.txt`."""
    cases = []
    text = (FOLDER / f"{name}.txt").read_text()
    for block in re.split("^== ", text, flags=re.MULTILINE)[1:]:
        heading, _, rest = block.partition("\n")
        whole = heading.startswith("file ")
        rule, _, replacement = heading.removeprefix("file ").partition(" -> ")
        wrong, _, right = rest.partition("-- right\n")
        wrong, right = (_source(text, whole=whole) for text in (wrong, right))
        (line,) = (i for i, text in enumerate(wrong.split("\n"), 1) if text.endswith("# here"))
        cases.append(Case(rule, replacement, wrong, right, line))
    return cases


@dataclass(frozen=True)
class Construct:
    """A construct that the reading of the open front end names, and what the lint says of it.

    `verdict` is a rule of level 2, "level 1 RULE", "accepted" or "not decided: REASON".
    """

    name: str
    verdict: str
    source: str

    def __str__(self) -> str:
        return self.name


def read_constructs(name: str) -> list[Construct]:
    """Return the constructs of `tests/data/lint/front_end/NAME.txt`, in the reading's order."""
    constructs = []
    text = (FOLDER / "front_end" / f"{name}.txt").read_text()
    for block in re.split("^== ", text, flags=re.MULTILINE)[1:]:
        heading, _, source = block.partition("\n")
        whole = heading.startswith("file ")
        construct, _, verdict = heading.removeprefix("file ").partition(" -> ")
        constructs.append(Construct(construct, verdict, _source(source, whole=whole)))
    return constructs


def _source(text: str, *, whole: bool) -> str:
    return HEADER + (text if whole else KERNEL + textwrap.indent(text, "    "))


def reports(source: str, level: int) -> list[Finding]:
    """Return the findings of one level in a file that starts with the usual imports."""
    return [item for item in lint_source(HEADER + source) if item.kind.level == level]


def assert_case(case: Case, level: int) -> None:
    """Assert that the wrong snippet is reported where marked, and the right one not at all."""
    found = [item for item in lint_source(case.wrong) if item.kind.level == level]
    assert [(item.rule, item.line) for item in found] == [(case.rule, case.line)], found
    assert case.replacement in found[0].replacement
    assert found[0].replacement
    assert [item for item in lint_source(case.right) if item.kind.level == level] == []
