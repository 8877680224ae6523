"""Reads what is to be linted: Python files, and the code cells of notebooks."""

import io
import json
import tokenize
from bisect import bisect_right
from pathlib import Path

SUFFIXES = (".py", ".ipynb")
MAX_BYTES = 64 << 20
_IMPORT = b"import nki"
_SKIPPED_FOLDERS = ("__pycache__", "node_modules", "site-packages")


class Source:
    """What one path holds: Python, or the code cells of a notebook as one text."""

    def __init__(self, path: str, content: str | bytes) -> None:
        self.path = path
        self._content = content
        self._cells: list[int] = []  # the lines at which the code cells start

    def text(self) -> str:
        """Return the Python text.

        Raises SyntaxError if its encoding is not known or it is no notebook, and
        UnicodeDecodeError (a ValueError) if it is not in that encoding.
        """
        if isinstance(self._content, str):
            return self._content
        if Path(self.path).suffix == ".ipynb":
            return self._notebook(self._content)
        encoding, _ = tokenize.detect_encoding(io.BytesIO(self._content).readline)
        return self._content.decode(encoding)

    def _notebook(self, content: bytes) -> str:
        try:
            cells = json.loads(content)["cells"]
            texts = [_code(cell) for cell in cells if cell["cell_type"] == "code"]
        except (ValueError, KeyError, TypeError) as error:
            raise SyntaxError(f"{self.path} is not a notebook: {error}") from error
        line = 1
        for text in texts:
            self._cells.append(line)
            line += text.count("\n") + 1
        return "\n".join(texts)

    def place(self, line: int) -> tuple[str, int]:
        """Return a line's path and number: those of its code cell in a notebook."""
        number = bisect_right(self._cells, line)
        if not number:
            return self.path, line
        return f"{self.path}:cell {number}", line - self._cells[number - 1] + 1


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
    """Return what a file holds.

    Raises OSError if it cannot be read, and ValueError if it is longer than MAX_BYTES.
    """
    with Path(path).open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path}: must be at most {MAX_BYTES} bytes long")
    return Source(str(path), content)


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
