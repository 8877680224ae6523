"""The wheel alone: complete, importable with the core dependencies, independent of the clone."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")

IMPORT_EVERYTHING = """
import importlib, pkgutil, segattn
for module in pkgutil.walk_packages(segattn.__path__, "segattn."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
        print(module.name, "imported")
    except ImportError as error:
        assert not module.ispkg, module.name
        print(module.name, error)
"""


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program with this test run's own paths taken out of its environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )


def packages() -> set[str]:
    """Every folder of the tree that holds an __init__.py, tests left out."""
    folders = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.rglob("__init__.py")}
    return {
        "segattn" if folder == "." else f"segattn/{folder}"
        for folder in folders
        if not folder.startswith(("tests", ".", "build")) or folder == "."
    }


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources in a folder whose name is no Python identifier."""
    folder = tmp_path_factory.mktemp("clone") / "seg-attn.copy"
    shutil.copytree(ROOT, folder, ignore=NOT_SOURCE)
    return folder


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q")
    built = run(*pip, "-w", folder, clone)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel and the core dependencies, and nothing else.

    The dependencies are links to those of this environment: no network, no second copy.
    """
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    for dependency in ("numpy", "ml_dtypes"):
        spec = find_spec(dependency)
        assert spec is not None
        assert spec.origin is not None
        package = Path(spec.origin).parent
        for path in (package, package.with_name(f"{package.name}.libs")):
            if path.exists():
                (site / path.name).symlink_to(path)
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "-q")
    installed = run(*pip, wheel)
    assert installed.returncode == 0, installed.stderr
    return python


def test_the_wheel_holds_every_package_under_one_name_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"segattn"}
    inside = {str(Path(name).parent) for name in names if name.endswith("__init__.py")}
    assert inside == packages()
    assert "segattn/py.typed" in names


def test_every_module_imports_or_names_the_extra_that_it_needs(python: Path) -> None:
    result = run(python, "-c", IMPORT_EVERYTHING, cwd=python.parent)
    assert result.returncode == 0, result.stderr
    lines = dict(line.split(" ", 1) for line in result.stdout.splitlines())
    assert {name.replace(".", "/") for name in lines} | {"segattn"} >= packages()
    refused = {name: text for name, text in lines.items() if text != "imported"}
    assert all(re.search(r"segattn\[|extra '", text) for text in refused.values()), refused


def test_the_command_without_its_extra_says_what_to_install(python: Path) -> None:
    result = run(python.with_name("segattn"), "generate", "the", "--model", python)
    assert result.returncode == 2
    assert result.stderr.endswith(
        "error: 'gguf' is not installed: pip install 'segattn[model]' brings it\n"
    )


def test_a_clone_in_a_folder_with_a_dash_runs_tests_and_installs_editable(clone: Path) -> None:
    folder = clone.parent / "environment"
    venv.create(folder, with_pip=False, system_site_packages=False)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(str(Path(pytest.__file__).parents[1]))
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "-q")
    installed = run(*pip, "--no-build-isolation", "-e", clone)
    assert installed.returncode == 0, installed.stderr
    result = run(python, "-m", "pytest", "-q", "tests/reference/test_paging.py", cwd=clone)
    assert result.returncode == 0, result.stdout
    where = run(python, "-c", "import segattn; print(segattn.__file__)", cwd=folder)
    assert Path(where.stdout.strip()) == clone / "__init__.py", where.stderr


def test_the_source_distribution_holds_documents_examples_and_tests_that_run(
    clone: Path, tmp_path: Path
) -> None:
    build = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
    built = run(sys.executable, "-c", build, tmp_path, cwd=clone)
    assert built.returncode == 0, built.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for part in ("docs", "examples", "tests"):
        there = {path.relative_to(folder) for path in (folder / part).rglob("*") if path.is_file()}
        here = {path.relative_to(clone) for path in (clone / part).rglob("*") if path.is_file()}
        assert there >= {path for path in here if path.suffix != ".pyc"}, part
    assert {"README.md", "CHANGELOG.md", "mkdocs.yml", "Makefile"} <= set(os.listdir(folder))
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "segattn").symlink_to(folder)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "path")}
    tests = (
        "tests/reference/test_paging.py",
        "tests/scheduler/test_replay.py",
        "tests/test_habits.py",
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
