"""The lint over files: what they import from each other, notebooks, encodings, broken files."""

import json
from pathlib import Path

import pytest

from segattn.reference.nki.lint import lint_file, lint_files
from segattn.reference.nki.lint.command import main

CONDITION = """
import nki.language as nl

class Condition(nl.NKIObject):
    def run(self, part):
        if self.trips == None:
            part(0)
        else:
            repeat(part, self.trips)

    def call(self, part):
        part(0)

def repeat(body, trips):
    nl.fori_loop(0, trips, body_fun=body)
"""
KERNEL = """
import nki
import nki.isa as nisa
from .condition import Condition, repeat
from . import condition as c

@nki.jit
def kernel(x, condition, n):
    def part(i):
        nisa.memset(x, value=0)
    {call}
"""
MIXED = """
import nki
from sizes import rows

@nki.jit
def kernel(x):
    return rows(x)
"""
SIZES = """
def rows(x):
    return [i for i in range(4)]

def host(x):
    return [i for i in range(4)]
"""
AS_BYTES = "import nki.language as nl\n{}\ndef kernel(x):\n    nl.load(x)\n    nl.arange(4)\n"


def write(folder: Path, **texts: str) -> dict[str, Path]:
    paths = {name: folder / f"{name}.py" for name in texts}
    for name, text in texts.items():
        paths[name].write_text(text)
    return paths


@pytest.mark.parametrize(
    "call",
    [
        "repeat(part, n)",
        "repeat(trips=n, body=part)",
        "c.repeat(part, n)",
        "condition.run(part)",
        "Condition().run(part=part)",
        "last = part\n    repeat(last, n)",
        "repeat(part if n > 1 else part, n)",
    ],
)
def test_bodies_that_a_helper_of_another_file_passes_on_are_information(
    tmp_path: Path, call: str
) -> None:
    paths = write(tmp_path, condition=CONDITION, kernel=KERNEL.format(call=call))
    found = lint_file(paths["kernel"])
    assert [item.rule for item in found] == ["loop-body"]
    assert "part is the local body of nl.fori_loop" in found[0].message


@pytest.mark.parametrize("call", ["condition.call(part)", "part(0)", "unknown(part)"])
def test_local_functions_that_no_loop_gets_are_warned_about(tmp_path: Path, call: str) -> None:
    paths = write(tmp_path, condition=CONDITION, kernel=KERNEL.format(call=call))
    assert [item.rule for item in lint_file(paths["kernel"])] == ["nested-function"]


def test_what_kernels_call_in_another_file_is_kernel_code_there(tmp_path: Path) -> None:
    paths = write(tmp_path, mixed=MIXED, sizes=SIZES)
    assert lint_file(paths["sizes"]) == []
    (found,) = lint_files([paths["mixed"], paths["sizes"]])
    assert (Path(found.path).name, found.line, found.rule) == ("sizes.py", 3, "comprehension")


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
    assert main([str(tmp_path), "--json"]) == 1


def test_json_lists_findings_and_information_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write(tmp_path, condition=CONDITION, kernel=KERNEL.format(call="repeat(part, n)"))
    paths |= write(tmp_path, old=AS_BYTES.format(""))
    assert main(["--json", str(paths["kernel"])]) == 0
    (first,) = capsys.readouterr().out.splitlines()
    assert json.loads(first)["findings"] == []
    assert [item["rule"] for item in json.loads(first)["information"]] == ["loop-body"]
    assert main(["--json", str(paths["old"])]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding == {
        "path": str(paths["old"]),
        "line": 5,
        "column": 5,
        "level": 1,
        "kind": "removed",
        "rule": "removed-api",
        "message": "nl.arange: removed in 0.2.0",
        "replacement": "slices, or .ap() for other access patterns",
    }


def test_information_is_shown_on_request_and_does_not_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write(tmp_path, condition=CONDITION, kernel=KERNEL.format(call="repeat(part, n)"))
    assert main([str(paths["kernel"])]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "0 at level 1, 0 at level 2, 1 for information\n")
    assert main(["--information", "--level", "1", str(paths["kernel"])]) == 0
    assert "information [loop-body]" in capsys.readouterr().out


def test_an_unreadable_file_and_an_empty_folder_end_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "good.py").write_text("import nki\n")
    for path, message in (("missing.py", "does not exist"), ("empty", "has no Python file")):
        with pytest.raises(SystemExit) as error:
            main([str(tmp_path / "good.py"), str(tmp_path / path)])
        assert error.value.code == 2
        assert message in capsys.readouterr().err
