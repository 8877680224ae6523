"""Runs `segattn` inside the test process."""

import contextlib
import io
import json
from dataclasses import dataclass
from typing import Any
from unittest import mock

from segattn.runner.cli import main


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


def segattn(*arguments: object) -> Result:
    """Run `segattn ARGUMENTS`; neither stream is a terminal."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch("sys.argv", ["segattn", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as error:
            status = error.code
        else:
            status = 0
    assert isinstance(status, int)
    return Result(status, out.getvalue(), err.getvalue())
