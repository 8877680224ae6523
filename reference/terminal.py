"""What commands show on a terminal: escaped text, tables that fit, progress."""

import shutil
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

Advance = Callable[[int], None]
"""Tells how many more units of a phase are done."""

ShowProgress = Callable[[str, int], AbstractContextManager[Advance]]
"""(description, units in all) -> the phase, which may end early."""

_UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories that a terminal obeys instead of showing: controls, format marks, surrogates,
line separators."""
_LEAST_WRAPPED = 16


def printable(text: object, keep: str = "") -> str:
    """`text` with every character that could steer a terminal escaped, those of `keep` excepted."""
    return "".join(
        c if c in keep or unicodedata.category(c) not in _UNSAFE else _escaped(c) for c in str(text)
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def one_line(text: object) -> str:
    """`text` on one line, escaped."""
    return printable(" ".join(str(text).split()))


@dataclass(frozen=True)
class Column:
    """A column of a table; numbers stand right. `wide`: shown with --wide only."""

    name: str
    right: bool = False
    wide: bool = False


def columns(*names: str) -> list[Column]:
    """Columns from short texts: `>` before a name aligns right, `+` leaves it to --wide."""
    return [Column(n.lstrip("+>"), ">" in n[:2], n.startswith("+")) for n in names]


def table(
    title: str, heads: Sequence[Column], rows: Sequence[Sequence[object]], *, wide: bool = False
) -> str:
    """A table as text; without `wide` it fits the terminal, or 80 columns of a file.

    Then columns for --wide are left out and the texts of the widest left-aligned column wrap.
    """
    shown = [number for number, head in enumerate(heads) if wide or not head.wide]
    cells = [[printable(row[number]) for number in shown] for row in rows]
    heads = [heads[number] for number in shown]
    widths = [
        max(len(head.name), *(len(row[n]) for row in cells), 0) for n, head in enumerate(heads)
    ]
    excess = sum(widths) + 2 * (len(widths) - 1) - shutil.get_terminal_size((80, 24)).columns
    texts = [number for number, head in enumerate(heads) if not head.right]
    if excess > 0 and not wide and texts:
        widest = max(texts, key=lambda number: widths[number])
        widths[widest] = max(widths[widest] - excess, _LEAST_WRAPPED)
    lines = [title, *_lines([head.name for head in heads], heads, widths)]
    lines.append("  ".join("-" * width for width in widths))
    for row in cells:
        lines += _lines(row, heads, widths)
    return "\n".join(lines)


def _lines(row: Sequence[str], heads: Sequence[Column], widths: Sequence[int]) -> list[str]:
    wrapped = [
        textwrap.wrap(cell, max(width, 1)) or [""] for cell, width in zip(row, widths, strict=True)
    ]
    return [
        "  ".join(
            f"{cell[line] if line < len(cell) else '':{'>' if head.right else '<'}{width}}"
            for cell, head, width in zip(wrapped, heads, widths, strict=True)
        ).rstrip()
        for line in range(max(map(len, wrapped)))
    ]


@contextmanager
def phase(description: str, total: int) -> Iterator[Advance]:
    """Show a phase of `total` units on stderr until the block ends.

    A bar on a terminal; elsewhere a line at the start and at each quarter.
    """
    shown = _Bar if sys.stderr.isatty() else _PlainLines
    progress = shown(printable(description), max(total, 1))
    try:
        yield progress
    finally:
        progress.end()


class _PlainLines:
    def __init__(self, description: str, total: int) -> None:
        self._description, self._total, self._done = description, total, 0
        self._show()

    def __call__(self, amount: int) -> None:
        quarters = 4 * self._done // self._total
        self._done += amount
        if 4 * self._done // self._total > quarters:
            self._show()

    def _show(self) -> None:
        print(f"{self._description}: {self._done}/{self._total}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leaves its lines where they are."""


class _Bar(_PlainLines):
    def __init__(self, description: str, total: int) -> None:
        self._start = time.monotonic()
        super().__init__(description, total)

    def __call__(self, amount: int) -> None:
        self._done += amount
        self._show()

    def _show(self) -> None:
        filled = min(24 * self._done // self._total, 24)
        line = (
            f"{self._description} [{'#' * filled:<24}] {self._done}/{self._total} "
            f"{time.monotonic() - self._start:.0f} s"
        )
        width = shutil.get_terminal_size((80, 24)).columns
        print(f"\r{line[: width - 1]}\x1b[K", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Wipes the line."""
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
