"""Progress on stderr: a bar on a terminal, a few plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ..reference.extras import MissingExtraError

Advance = Callable[[int], None]
"""Tells how many more units of a phase are done."""

ShowProgress = Callable[[str, int], AbstractContextManager[Advance]]
"""(description, units in all) -> the phase, which may end early."""


@contextmanager
def phase(description: str, total: int) -> Iterator[Advance]:
    """Show a phase of `total` units on stderr until the block ends."""
    if not sys.stderr.isatty():
        yield _PlainLines(description, total)
        return
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )
    except ModuleNotFoundError as error:
        raise MissingExtraError("rich", "cli") from error
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda amount: bar.advance(task, amount)


class _PlainLines:
    """A line at the start and at each quarter."""

    def __init__(self, description: str, total: int) -> None:
        self._description = description
        self._total = total
        self._done = 0
        print(f"{description}: 0/{total}", file=sys.stderr, flush=True)

    def __call__(self, amount: int) -> None:
        quarters = 4 * self._done // self._total
        self._done += amount
        if 4 * self._done // self._total > quarters:
            print(f"{self._description}: {self._done}/{self._total}", file=sys.stderr, flush=True)
