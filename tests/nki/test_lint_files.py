"""The lint over files: what they import from each other, notebooks, encodings, broken files."""

import json
from pathlib import Path

import pytest

from segattn.cli import main
from segattn.reference.nki.lint import lint_file, lint_files

MIXED = """
import nki
from sizes import rows

@nki.jit
def kernel(x):
    return rows(x)
"""
SIZES = """
CACHE = []

def rows(x):
    CACHE.append(x)

def host(x):
    CACHE.append(x)
"""
AS_BYTES = "import nki.language as nl\n{}\ndef kernel(x):\n    nl.load(x)\n    nl.arange(4)\n"


def write(folder: Path, **texts: str) -> dict[str, Path]:
    paths = {name: folder / f"{name}.py" for name in texts}
    for name, text in texts.items():
        paths[name].write_text(text)
    return paths


def test_what_kernels_call_in_another_file_is_kernel_code_there(tmp_path: Path) -> None:
    paths = write(tmp_path, mixed=MIXED, sizes=SIZES)
    assert lint_file(paths["sizes"]) == []
    (found,) = lint_files([paths["mixed"], paths["sizes"]])
    assert (Path(found.path).name, found.line, found.rule) == ("sizes.py", 5, "external-state")


@pytest.mark.parametrize(
    "content",
    [
        AS_BYTES.format("").replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + AS_BYTES.format("").encode(),
        ("# -*- coding: latin-1 -*-\n" + AS_BYTES.format("# caf\xe9")).encode("latin-1"),
    ],
)
def test_files_are_read_as_python_reads_them(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kernel.py"
    path.write_bytes(content)
    assert [item.rule for item in lint_file(path)] == ["removed-api"]


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (b'import nki\nprint "text"\n', 2, "Missing parentheses"),
        (b"import nki\n\n\n# caf\xe9\n", 4, "save it as UTF-8"),
        (b"# coding: nowhere\n", 1, "unknown encoding"),
        (b"import nki\nx = " + b"(" * 300 + b")" * 300, 2, "too many nested parentheses"),
        (b"def kernel(x:\n", 1, "never closed"),
        (b"x = '\0'\n", 1, "null bytes"),
    ],
)
def test_what_is_not_python_is_one_finding(
    tmp_path: Path, content: bytes, line: int, message: str
) -> None:
    path = tmp_path / "kernel.py"
    path.write_bytes(content)
    (found,) = lint_file(path)
    assert (found.line, found.rule, found.kind.fails) == (line, "syntax", True)
    assert message in found.message


def test_long_expressions_are_read(tmp_path: Path) -> None:
    total = " + ".join(["x"] * 900)
    path = tmp_path / "kernel.py"
    path.write_text(AS_BYTES.format("") + f"    a = {total}\n")
    assert [item.rule for item in lint_file(path)] == ["removed-api"]


def test_a_notebook_is_linted_by_its_code_cells(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "code", "source": ["%matplotlib inline\n", "!pip install \\\n", "  nki"]},
        {"cell_type": "markdown", "source": "# Text"},
        {"cell_type": "code", "source": "import nki\nimport nki.language as nl"},
        {"cell_type": "code", "source": "%%bash\nls\n"},
        {"cell_type": "code", "source": ["@nki.jit\n", "def kernel(x):\n", "    nl.arange(4)"]},
    ]
    path = tmp_path / "book.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    (found,) = lint_file(path)
    assert (found.path, found.line, found.rule) == (f"{path}:cell 4", 3, "removed-api")
    path.write_text("{")
    (found,) = lint_file(path)
    assert found.message.startswith(f"not Python 3: {path} is not a notebook")


def test_folders_are_searched_without_hidden_and_installed_files(tmp_path: Path) -> None:
    for folder in (".venv", "lib/site-packages", "kernels/deep", "__pycache__"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file.py").write_text("print 1\n")
    (tmp_path / "other.ipynb").write_text('{"cells": "import torch"}')
    assert main(["lint", str(tmp_path), "--json"]) == 1
