"""Undo log: what makes a scheduler call happen as a whole or not at all."""

from collections.abc import Callable
from types import TracebackType


class Transaction:
    """Records how to take back each change made inside `with transaction:`.

    An exception that leaves the block undoes its changes, latest first, and goes on. Blocks nest:
    an inner one is a savepoint of the outer one. An undo is recorded before the change it belongs
    to and puts the old values back, so it is right whether or not the change was made.
    """

    __slots__ = ("_savepoints", "_undo")

    def __init__(self) -> None:
        self._undo: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self._savepoints: list[int] = []

    def record(self, undo: Callable[..., object], *args: object) -> None:
        """Note that `undo(*args)` takes back the change that is about to be made."""
        self._undo.append((undo, args))

    def __enter__(self) -> None:
        self._savepoints.append(len(self._undo))

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        savepoint = self._savepoints.pop()
        if exception_type is not None:
            while len(self._undo) > savepoint:
                undo, args = self._undo.pop()
                undo(*args)
        elif not self._savepoints:
            self._undo.clear()
