"""Errors and warnings of the interpreter, and where in the kernel they happened."""

from __future__ import annotations

import linecache
import re
import sys
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

from .changes import keyword_hint

_HERE = str(Path(__file__).parent)


class NkiValidationError(Exception):
    """A documented hardware or language constraint is violated."""


class RunTimeValueError(NkiValidationError, TypeError):
    """A value that the device computes stands where Python, or a loop, needs another kind."""


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


class _InterpreterFiles(dict[str, bool]):
    """Whether a file is the interpreter's, by its name.

    A string keeps its hash; a code object, the other key at hand, computes its own from all that it
    holds, for each instruction that is recorded.
    """

    def __missing__(self, name: str) -> bool:
        inside = self[name] = name.startswith(_HERE)
        return inside


_internal = _InterpreterFiles()


def kernel_place() -> tuple[CodeType, int]:
    """Code object and line of the innermost frame outside the interpreter."""
    frame = sys._getframe(2)  # this function and its caller are inside
    while _internal[frame.f_code.co_filename] and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


def kernel_line() -> tuple[str, int]:
    """File and line of the innermost frame outside the interpreter."""
    code, line = kernel_place()
    return code.co_filename, line


def kernel_text() -> str:
    """The source line that runs in the kernel, "" without a source file."""
    return linecache.getline(*kernel_line())


def called_from_kernel() -> tuple[FrameType, int]:
    """The frame of the interpreter's function that the kernel called, and the kernel's line."""
    entry = sys._getframe(1)
    while entry.f_back is not None:
        if not _internal[entry.f_back.f_code.co_filename]:
            return entry, entry.f_back.f_lineno
        entry = entry.f_back
    return entry, entry.f_lineno


@lru_cache(maxsize=4096)
def assigned_name(file: str, line: int) -> str:
    """The variable that a source line assigns, "" when it is no plain assignment or one of two."""
    text = linecache.getline(file, line)
    found = re.match(r"\s*(\w+)(\s*:[^=]+)?\s*=(?!=)", text)
    return found.group(1) if found and ";" not in text else ""


_KEYWORD = re.compile(r"(\w+)\(\) got an unexpected keyword argument '(\w+)'")


def locate(error: Exception) -> None:
    """Append the kernel's line to the message of an error that does not name it.

    To a keyword that an instruction does not take, what to write instead.
    """
    found = _KEYWORD.search(str(error)) if type(error) is TypeError else None
    hint = keyword_hint(*found.groups()) if found else ""
    if hint:
        error.args = (f"{error.args[0]}: {hint}", *error.args[1:])
    frames = error.__traceback__
    where = None
    while frames is not None:
        code = frames.tb_frame.f_code
        if not _internal[code.co_filename]:
            where = f" (at {code.co_filename}:{frames.tb_lineno})"
        frames = frames.tb_next
    if where is not None and error.args and " (at " not in str(error.args[0]):
        error.args = (f"{error.args[0]}{where}", *error.args[1:])


def at_kernel_line() -> str:
    """The kernel line as ` (at FILE:LINE)`, to be appended to a message."""
    file, line = kernel_line()
    return f" (at {file}:{line})"
