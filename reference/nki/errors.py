"""Errors and warnings of the interpreter, and where in the kernel they happened."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)


class NkiValidationError(Exception):
    """A documented hardware or language constraint is violated."""


class UninitializedReadError(NkiValidationError):
    """An instruction reads bytes that nothing has written."""


class CapacityError(NkiValidationError):
    """More SBUF or PSUM is live at once than the core has."""


class OutOfBoundsError(NkiValidationError):
    """A run-time index or offset leaves its tensor under `oob_mode.error`."""


class CoreRaceError(NkiValidationError):
    """Two cores of one launch touch the same bytes without a barrier between them."""


class DeadlockError(NkiValidationError):
    """The cores of one launch wait for each other for ever."""


class NkiWarning(UserWarning):
    """A rule whose level is "warn" was broken."""


def kernel_line() -> tuple[str, int]:
    """File and line of the innermost frame outside the interpreter."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def at_kernel_line() -> str:
    """The kernel line as ` (at FILE:LINE)`, to be appended to a message."""
    file, line = kernel_line()
    return f" (at {file}:{line})"
