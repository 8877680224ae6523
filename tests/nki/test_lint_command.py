"""`segattn lint`, and the check that runs before a kernel."""

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from segattn.reference.nki.lint import check_kernel, lint_file
from segattn.reference.nki.lint.command import main

KERNELS = """
import nki
import nki.language as nl
import helpers as h
from helpers import fill
from importlib import import_module

@nki.jit
def bad(x):
    return [i for i in range(4)]

@nki.jit
def good(x):
    for i in nl.affine_range(4):
        x = x[i]
    a, b = (enumerate(x), 2)
    return x

@nki.jit
def calls_other_file(x):
    return fill(x)

@nki.jit
def calls_module(x):
    return h.fill(x)

@nki.jit
def calls_python(x):
    return import_module(x)
"""
HELPERS = """
def fill(x):
    try:
        return x
    finally:
        pass

def unused(x):
    raise ValueError(x)
"""
UNKNOWN = """
import nki
import nki.language as nl

@nki.jit
def kernel(x):
    if x is None:
        x = nl.no_such_name
    return x
"""
STUB = """
language = None
def jit(function):
    return function
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in {"kernel_file.py": KERNELS, "helpers.py": HELPERS}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "nki").mkdir()
    (tmp_path / "nki" / "__init__.py").write_text(STUB)
    (tmp_path / "nki" / "language.py").write_text("affine_range = range")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("nki", "nki.language", "helpers", "kernel_file", "unknown_file")
    assert not sys.modules.keys() & set(names)
    yield tmp_path / "kernel_file.py"
    for name in names:
        sys.modules.pop(name, None)


def test_check_kernel_reports_the_kernel_and_not_its_neighbours(kernels: Path) -> None:
    module = import_module("kernel_file")
    (found,) = check_kernel(module.bad)
    assert (found.path, found.line, found.rule) == (str(kernels), 10, "comprehension")
    (found,) = check_kernel(module.good)
    assert (found.rule, found.kind.fails) == ("deprecated-api", False)


def test_check_kernel_follows_functions_into_other_files(kernels: Path) -> None:
    module = import_module("kernel_file")
    for kernel in (module.calls_other_file, module.calls_module):
        (found,) = check_kernel(kernel)
        assert Path(found.path).name == "helpers.py"
        assert (found.line, found.rule, found.kind.fails) == (3, "try", True)


def test_check_kernel_does_not_judge_the_standard_library(kernels: Path) -> None:
    assert check_kernel(import_module("kernel_file").calls_python) == ()


def test_check_kernel_leaves_names_that_do_not_exist_to_the_run(kernels: Path) -> None:
    path = kernels.with_name("unknown_file.py")
    path.write_text(UNKNOWN)
    kernel = import_module("unknown_file").kernel
    assert [item.rule for item in lint_file(path) if item.kind.fails] == ["unknown-api"]
    assert [item.rule for item in check_kernel(kernel) if item.kind.fails] == []


def test_check_kernel_follows_wrappers_and_takes_code_without_source(kernels: Path) -> None:
    module = import_module("kernel_file")

    def wrapper(x: object) -> object:
        return x

    wrapper.__wrapped__ = module.bad  # type: ignore[attr-defined]  # what functools.wraps sets
    assert [item.rule for item in check_kernel(wrapper)] == ["comprehension"]
    scope: dict[str, object] = {}
    exec("def made(x):\n    raise ValueError", scope)
    made = scope["made"]
    assert callable(made)
    assert check_kernel(made) == ()


def test_the_command_prints_one_line_per_finding_and_fails_on_level_1(
    kernels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(kernels)]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        f"{kernels}:10:12",
        f"{kernels}:14:14",
        f"{kernels}:16:13",
    ]
    assert "level 1 unlisted [comprehension] list comprehension" in lines[0]
    assert "level 1 deprecated [deprecated-api] nl.affine_range: deprecated; use: range" in lines[1]
    assert "level 2 front end [builtin] enumerate() does not exist" in lines[2]
    assert err == "2 at level 1, 1 at level 2, 0 for information\n"
    assert main(["--level", "1", str(kernels)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_the_command_searches_folders_and_passes_clean_files(tmp_path: Path) -> None:
    (tmp_path / "clean.py").write_text("import nki\n\n@nki.jit\ndef kernel(x):\n    return x\n")
    assert main([str(tmp_path)]) == 0


def test_the_command_refuses_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        main([str(tmp_path / "missing.py")])
    assert error.value.code == 2


def test_the_package_runs_as_a_program(kernels: Path) -> None:
    command = [sys.executable, "-m", "segattn.reference.nki.lint", str(kernels)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 3)
