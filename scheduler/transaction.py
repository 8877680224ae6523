"""Undo log: what makes a scheduler call happen as a whole or not at all."""

from types import TracebackType
from typing import Any


class Transaction(list[tuple[Any, ...]]):
    """Records how to take back each change made inside `with transaction:`.

    `record((undo, *args))` notes that `undo(*args)` takes back the change that is about to be made;
    it is `append`, since a Python function around it would take several percent of a step.

    An exception that leaves the block undoes its changes, latest first, and goes on. Blocks nest:
    an inner one is a savepoint of the outer one. An undo is recorded before the change it belongs
    to and puts the old values back, so it is right whether or not the change was made.
    """

    __slots__ = ("_savepoints",)

    record = list.append

    def __init__(self) -> None:
        super().__init__()
        self._savepoints: list[int] = []

    def __enter__(self) -> None:
        self._savepoints.append(len(self))

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        savepoint = self._savepoints.pop()
        if exception_type is not None:
            while len(self) > savepoint:
                undo, *args = self.pop()
                undo(*args)
        elif not self._savepoints:
            self.clear()
