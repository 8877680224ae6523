"""What a lint rule reports."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Why something is reported; the value is the word that the reports print.

    DEPRECATED and HOST still compile; all others do not, or not to what the source says.
    """

    SYNTAX = "syntax"
    REFUSED = "refused"
    REMOVED = "removed"
    DEPRECATED = "deprecated"
    HOST = "host code"

    @property
    def fails(self) -> bool:
        """Whether NKI refuses the code."""
        return self not in (Kind.DEPRECATED, Kind.HOST)


@dataclass(frozen=True, order=True)
class Finding:
    """One report: where, which rule, what is wrong and what to write instead."""

    path: str
    line: int
    column: int
    rule: str
    kind: Kind = Kind.REFUSED
    message: str = ""
    replacement: str = ""

    def __str__(self) -> str:
        """Return `path:line:column: kind [rule] message; use: replacement`."""
        text = f"{self.path}:{self.line}:{self.column}: {self.kind.value} [{self.rule}] "
        text += self.message
        return f"{text}; use: {self.replacement}" if self.replacement else text
