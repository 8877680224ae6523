"""What storages call whose accesses need more than the fast path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .dtypes import Array

if TYPE_CHECKING:
    from .storage import Storage, View


class Watch:
    """Hooks for storages whose accesses need more than the fast path."""

    __slots__ = ()

    def before_read(
        self,
        storage: Storage,
        view: View,
        instruction: str,
        operand: str,
        rows: Array | None = None,
    ) -> None:
        """Called before a read through `view`, of its rows `rows` only if given."""

    def before_write(
        self, storage: Storage, view: View, instruction: str, rows: Array | None = None
    ) -> None:
        """Called before a write through `view`, of its rows `rows` only if given."""
