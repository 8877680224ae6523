"""Rules "psum_chains" and "accumulate_none": accumulation groups of one PSUM tensor.

A chain is a matmul that overwrites and those that add to it. Where several chains share a tensor,
all but the last may lose their first partial sum; a chain of one matmul has none to lose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..strict import violation

if TYPE_CHECKING:
    from ..view import View


class _Chain:
    """One chain: where it sums, its number in the tensor, whether a second matmul added to it, and
    how many chains had begun when it was last read (0: not read).
    """

    __slots__ = ("long", "number", "read_at", "view")

    def __init__(self, view: View, number: int) -> None:
        self.view = view
        self.number = number
        self.long = False
        self.read_at = 0


class Chains:
    """The chains of one PSUM tensor whose sums still stand."""

    __slots__ = ("_all", "_begun", "_last_long")

    def __init__(self) -> None:
        self._all: list[_Chain] = []
        self._begun = 0
        self._last_long = 0

    def begin(self, view: View) -> None:
        """A matmul overwrites these elements."""
        self.forget(view)
        self._begun += 1
        self._all.append(_Chain(view, self._begun))

    def add(self, view: View, me: str, name: str) -> None:
        """A matmul adds to these elements."""
        if self._all and self._all[-1].view is view and self._all[-1].long:
            return  # the usual case: the newest chain goes on
        for chain in self._all:
            if chain.long or not _meet(chain.view, view):
                continue
            chain.long = True
            self._last_long = max(self._last_long, chain.number)
            for other in self._all:
                if other.long and other.number < chain.number <= other.read_at:
                    _report(me, name, other, chain.number)

    def read(self, view: View, me: str, name: str) -> None:
        """An instruction reads these elements."""
        for chain in self._all:
            if _meet(chain.view, view):
                chain.read_at = self._begun
                if chain.long and chain.number < self._last_long:
                    _report(me, name, chain, self._last_long)

    def was_read(self, view: View) -> bool:
        """Whether a sum of these elements has been read."""
        return any(chain.read_at and _meet(chain.view, view) for chain in self._all)

    def forget(self, view: View | None = None) -> None:
        """Something else wrote these elements, or all."""
        if view is None:
            self._all.clear()
        elif self._all:
            self._all = [chain for chain in self._all if not _meet(chain.view, view)]
        if not self._all:
            self._last_long = 0


def _report(me: str, name: str, chain: _Chain, later: int) -> None:
    violation(
        "psum_chains",
        f"{me}: reads the sums of accumulation chain {chain.number} of {name!r} (shape "
        f"{chain.view.layout.shape}) after chain {later} began in the same PSUM tensor; use one "
        "tensor for each chain, or read a slice before the next chain begins",
    )


_met: dict[tuple[object, ...], bool] = {}


def _meet(a: View, b: View) -> bool:
    """Whether two views of one tensor have a byte in common."""
    if a is b:
        return True
    key = (a.layout, a.offset, b.layout, b.offset)
    found = _met.get(key)
    if found is None:
        try:
            found = bool(np.shares_memory(a.array, b.array, max_work=10_000))  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            found = True
        _met[key] = found
    return found
