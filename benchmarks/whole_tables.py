"""Tables that keep every cell: a terminal wraps their lines, a file gets them as they are."""

from segattn.reference.extras import MissingExtraError

try:
    from rich.console import Console, RenderableType
    from rich.measure import Measurement
except ImportError as error:
    raise MissingExtraError("rich", "cli") from error


def print_whole(console: Console, table: RenderableType) -> None:
    """Print `table` as wide as it wants to be; rich itself would cut cells to fit the console."""
    width = console.width
    unlimited = console.options.update(max_width=1 << 12)
    console.width = max(width, Measurement.get(console, unlimited, table).maximum)
    console.print(table)
    console.width = width
