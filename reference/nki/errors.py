"""Errors and warnings of the interpreter, and where in the kernel they happened."""

from __future__ import annotations

import linecache
import re
import sys
from functools import lru_cache
from pathlib import Path
from types import FrameType

_HERE = str(Path(__file__).parent)


class NkiValidationError(Exception):
    """A documented hardware or language constraint is violated."""


class UninitializedReadError(NkiValidationError):
    """An instruction reads bytes that nothing has written."""


class CapacityError(NkiValidationError):
    """More SBUF or PSUM is live at once than the core has."""


class OutOfBoundsError(NkiValidationError):
    """A run-time index or offset leaves its tensor under `oob_mode.error`."""


class OutsidePatternError(NkiValidationError):
    """An access pattern reaches outside its tensor."""


class CoreRaceError(NkiValidationError):
    """Two cores of one launch touch the same bytes without a barrier between them."""


class DeadlockError(NkiValidationError):
    """The cores of one launch wait for each other for ever."""


class NkiWarning(UserWarning):
    """A rule whose level is "warn" was broken."""


# By file name: a string keeps its hash, a code object computes its own from all that it holds.
_internal: dict[str, bool] = {}


def kernel_line() -> tuple[str, int]:
    """File and line of the innermost frame outside the interpreter."""
    frame = sys._getframe(1)
    while True:
        name = frame.f_code.co_filename
        inside = _internal.get(name)
        if inside is None:
            inside = _internal[name] = name.startswith(_HERE)
        if not inside or frame.f_back is None:
            return name, frame.f_lineno
        frame = frame.f_back


def called_from_kernel() -> tuple[FrameType, int]:
    """The frame of the interpreter's function that the kernel called, and the kernel's line."""
    entry = sys._getframe(1)
    while entry.f_back is not None:
        name = entry.f_back.f_code.co_filename
        inside = _internal.get(name)
        if inside is None:
            inside = _internal[name] = name.startswith(_HERE)
        if not inside:
            return entry, entry.f_back.f_lineno
        entry = entry.f_back
    return entry, entry.f_lineno


@lru_cache(maxsize=4096)
def assigned_name(file: str, line: int) -> str:
    """The variable that a source line assigns, "" when it is no plain assignment or one of two."""
    text = linecache.getline(file, line)
    found = re.match(r"\s*(\w+)(\s*:[^=]+)?\s*=(?!=)", text)
    return found.group(1) if found and ";" not in text else ""


def locate(error: Exception) -> None:
    """Append the kernel's line to the message of an error that does not name it."""
    frames = error.__traceback__
    where = None
    while frames is not None:
        code = frames.tb_frame.f_code
        if not code.co_filename.startswith(_HERE):
            where = f" (at {code.co_filename}:{frames.tb_lineno})"
        frames = frames.tb_next
    if where is not None and error.args and " (at " not in str(error.args[0]):
        error.args = (f"{error.args[0]}{where}", *error.args[1:])


def at_kernel_line() -> str:
    """The kernel line as ` (at FILE:LINE)`, to be appended to a message."""
    file, line = kernel_line()
    return f" (at {file}:{line})"
