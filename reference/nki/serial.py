"""Numbers that identify storages, arenas and registers in traces."""

from itertools import count

_serial = count(1)


def new_serial() -> int:
    """A number never given before in this process."""
    return next(_serial)
