"""What a lint rule reports."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Why something is reported; the value is the word that the reports print.

    The first five form level 1, FRONT_END is level 2, INFORMATION is no complaint. UNLISTED is
    Python that the language guide does not list but kernels use which AWS measured on a device.
    """

    SYNTAX = "syntax"
    REJECTED = "rejected"
    REMOVED = "removed"
    UNLISTED = "unlisted"
    DEPRECATED = "deprecated"
    FRONT_END = "front end"
    INFORMATION = "information"

    @property
    def level(self) -> int:
        """1 for errors, 2 for warnings about the open front end, 0 for information."""
        if self is Kind.INFORMATION:
            return 0
        return 2 if self is Kind.FRONT_END else 1

    @property
    def fails(self) -> bool:
        """Whether the NKI compiler refuses the code; deprecated API still compiles."""
        return self in (Kind.SYNTAX, Kind.REJECTED, Kind.REMOVED)


@dataclass(frozen=True, order=True)
class Finding:
    """One report: where, which rule, what is wrong and what to write instead."""

    path: str
    line: int
    column: int
    rule: str
    kind: Kind = Kind.REJECTED
    message: str = ""
    replacement: str = ""

    def __str__(self) -> str:
        """Return `path:line:column: level N kind [rule] message; use: replacement`."""
        level = f"level {self.kind.level} " if self.kind.level else ""
        text = f"{self.path}:{self.line}:{self.column}: {level}{self.kind.value} [{self.rule}] "
        text += self.message
        return f"{text}; use: {self.replacement}" if self.replacement else text
