"""Reads the lint's cases in tests/data/lint: a wrong snippet and a right one per rule.

A case is `== RULE -> part of the replacement`, the wrong snippet with its line marked `# here`,
`-- right` and the right snippet. Snippets are bodies of a kernel with arguments x and n, or whole
files where the heading says `== file RULE`.
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


def _source(text: str, *, whole: bool) -> str:
    return HEADER + (text if whole else KERNEL + textwrap.indent(text, "    "))


def reports(source: str) -> list[Finding]:
    """Return the findings in a file that starts with the usual imports."""
    return lint_source(HEADER + source)


def assert_case(case: Case) -> None:
    """Assert that the wrong snippet is reported where marked, and the right one not at all."""
    found = lint_source(case.wrong)
    assert [(item.rule, item.line) for item in found] == [(case.rule, case.line)], found
    assert case.replacement in found[0].replacement
    assert found[0].replacement
    assert lint_source(case.right) == []
