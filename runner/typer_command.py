"""Runs a function with annotated parameters as a sub-command (extra `cli`)."""

from collections.abc import Callable, Sequence

from ..reference.extras import MissingExtraError

try:
    import typer
except ModuleNotFoundError as error:
    raise MissingExtraError("typer", "cli") from error


def run(function: Callable[..., None], argv: Sequence[str], name: str) -> int:
    """Parse `argv` into the parameters of `function`, call it, return the exit status.

    The function leaves early with `typer.Exit(status)`. Wrong usage gives a message and status 2.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(function)
    try:
        app(list(argv), prog_name=f"segattn {name}")
    except SystemExit as left:
        # typer always leaves so, with a status of 0 when the function returns.
        return int(left.code or 0)
    return 0
