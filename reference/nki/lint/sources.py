"""Reads what is to be linted: Python files, and the code cells of notebooks."""

import json
from bisect import bisect_right
from pathlib import Path
from typing import NamedTuple

SUFFIXES = (".py", ".ipynb")
_IMPORT = b"import nki"
_SKIPPED_FOLDERS = ("__pycache__", "node_modules", "site-packages")


class Source(NamedTuple):
    """Text of one path; `cells` are the lines at which the code cells of a notebook start."""

    path: str
    text: str | bytes  # bytes are decoded as Python does
    cells: tuple[int, ...] = ()

    def place(self, line: int) -> tuple[str, int]:
        """Return a line's path and number: those of its cell in a notebook."""
        number = bisect_right(self.cells, line)
        if not number:
            return self.path, line
        return f"{self.path}:cell {number}", line - self.cells[number - 1] + 1


def files(folder: Path) -> list[Path]:
    """Return the Python files in a folder and the notebooks that import NKI.

    Hidden and installed files are left out.
    """
    found = []
    for path in folder.rglob("*"):
        inner = path.relative_to(folder).parts
        hidden = any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in inner)
        if path.suffix not in SUFFIXES or hidden or not path.is_file():
            continue
        if path.suffix == ".py" or _IMPORT in path.read_bytes():
            found.append(path)
    return sorted(found)


def read(path: str | Path) -> Source:
    """Return a file, or the code cells of a notebook as one text.

    Raises OSError if the file cannot be read.
    """
    content = Path(path).read_bytes()
    if Path(path).suffix != ".ipynb":
        return Source(str(path), content)
    try:
        cells = json.loads(content)["cells"]
        texts = [_code(cell) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        texts = [f"This is not a notebook: {type(error).__name__} {error}"]
    starts, line = [], 1
    for text in texts:
        starts.append(line)
        line += text.count("\n") + 1
    return Source(str(path), "\n".join(texts), tuple(starts))


def _code(cell: dict[str, str | list[str]]) -> str:
    """Return the Python of a cell; magics and shell lines become `pass`, foreign cells blank."""
    lines = "".join(cell["source"]).split("\n")
    if lines[0].startswith("%%"):
        return "\n" * (len(lines) - 1)
    kept, continued = [], False
    for line in lines:
        code = line.lstrip()
        foreign = code.startswith(("%", "!", "?"))
        indent = line[: len(line) - len(code)]
        kept.append(indent + "pass" if foreign else "" if continued else line)
        continued = (foreign or continued) and code.endswith("\\")
    return "\n".join(kept)
