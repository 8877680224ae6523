"""The lower bounds of dependencies as exact requirements, for `make test-oldest`.

    python tests/checks/lower_bounds.py EXTRA...

prints a line for each dependency of the core and of the extras. Standard library only: it runs
before anything is installed.
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(\[[a-z,]+\])?>=([0-9.]+)$")
OWN = re.compile(r"segattn\[([a-z,]+)\]$")


def requirements(project: dict[str, Any], extras: Sequence[str]) -> Iterator[str]:
    """Dependencies of the core and of the extras, those of extras that extras name included."""
    optional = project["optional-dependencies"]
    listed = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
    for line in listed:
        own = OWN.match(line)
        if own is None:
            yield line
        elif missing := [extra for extra in own[1].split(",") if extra not in extras]:
            yield from requirements(project | {"dependencies": []}, missing)


def pinned(requirement: str) -> str:
    """The oldest version that a requirement allows. ValueError if it has no lower bound."""
    found = REQUIREMENT.match(requirement)
    if found is None:
        raise ValueError(f"{requirement!r}: must be NAME>=VERSION")
    name, extra, version = found.groups()
    return f"{name}{extra or ''}=={version}"


if __name__ == "__main__":
    declared = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    print("\n".join(sorted({pinned(line) for line in requirements(declared, sys.argv[1:])})))
