"""`segattn lint`: its lines, levels of rules, and exit status."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from segattn.cli import main

KERNELS = """
import nki
import nki.language as nl

@nki.jit
def bad(x):
    return nl.arange(4)

@nki.jit
def old(x):
    for i in nl.affine_range(4):
        x = x[i]
    return x
"""


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    path = tmp_path / "kernel_file.py"
    path.write_text(KERNELS)
    return path


def test_one_line_per_finding_and_status_1_with_errors(
    kernels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lint", str(kernels)]) == 1
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    assert first == (
        f"{kernels}:7:12: removed [removed-api] nl.arange: removed in 0.2.0; use: slices, or .ap() "
        "for other access patterns (error)"
    )
    assert second == (
        f"{kernels}:11:14: deprecated [deprecated-api] nl.affine_range: deprecated; use: range "
        "(warning)"
    )
    assert err == "1 errors, 1 warnings\n"


@pytest.mark.parametrize(
    ("options", "status", "summary"),
    [
        (["--ignore", "removed-api"], 0, "0 errors, 1 warnings\n"),
        (["--ignore", "removed-api", "--ignore", "deprecated-api"], 0, "0 errors, 0 warnings\n"),
        (["--level", "removed-api=warning"], 0, "0 errors, 2 warnings\n"),
        (["--level", "deprecated-api=error"], 1, "2 errors, 0 warnings\n"),
        (["--level", "deprecated-api=off"], 1, "1 errors, 0 warnings\n"),
    ],
)
def test_every_rule_has_a_level(
    kernels: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    status: int,
    summary: str,
) -> None:
    assert main(["lint", str(kernels), *options]) == status
    assert capsys.readouterr().err == summary


@pytest.mark.parametrize(
    "options",
    [["--ignore", "removed"], ["--level", "removed-api=maybe"], ["--level", "removed=error"]],
)
def test_an_unknown_rule_or_level_ends_with_status_2(
    kernels: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert main(["lint", str(kernels), *options]) == 2
    assert "removed-api" in capsys.readouterr().err  # what is allowed


def test_json_has_all_fields(kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "--json", str(kernels)]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert first == {
        "path": str(kernels),
        "line": 7,
        "column": 12,
        "level": "error",
        "kind": "removed",
        "rule": "removed-api",
        "message": "nl.arange: removed in 0.2.0",
        "replacement": "slices, or .ap() for other access patterns",
    }
    assert second["level"] == "warning"


def test_the_command_searches_folders_and_passes_clean_files(tmp_path: Path) -> None:
    (tmp_path / "clean.py").write_text("import nki\n\n@nki.jit\ndef kernel(x):\n    return x\n")
    assert main(["lint", str(tmp_path)]) == 0


def test_an_unreadable_file_and_an_empty_folder_end_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "good.py").write_text("import nki\n")
    for path, message in (("missing.py", "does not exist"), ("empty", "has no Python file")):
        assert main(["lint", str(tmp_path / "good.py"), str(tmp_path / path)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("program", [["segattn", "lint"], ["segattn.reference.nki.lint"]])
def test_the_lint_runs_as_a_program(kernels: Path, program: list[str]) -> None:
    command = [sys.executable, "-m", *program, str(kernels)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 2)
    missing = [sys.executable, "-m", *program, str(kernels / "missing.py")]
    done = subprocess.run(missing, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "does not exist" in done.stderr
