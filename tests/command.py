"""Runs `segattn` inside the test process."""

import contextlib
import io
import json
from dataclasses import dataclass
from typing import Any
from unittest import mock

from segattn.cli import main


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What `--json` printed."""
        return json.loads(self.out)


def segattn(*arguments: object, typed: str = "") -> Result:
    """Run `segattn ARGUMENTS` with `typed` as its input; no stream is a terminal."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch("sys.stdin", io.StringIO(typed)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = main(list(map(str, arguments)))
    return Result(status, out.getvalue(), err.getvalue())
