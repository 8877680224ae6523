"""Dependencies go one way: reference <- kernels, scheduler <- runner <- benchmarks, tests."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "reference": ("reference",),
    "kernels": ("kernels", "reference"),
    "scheduler": (
        *("scheduler", "reference.paging", "reference.terminal", "reference.outputs"),
        "reference.json_files",
    ),
    "scheduler/testing": ("scheduler", "reference"),
    "runner": ("runner", "scheduler", "kernels", "reference", "__version__"),
}
"""What the files of a folder may import of the project; benchmarks and tests import all of it."""
SOURCES = sorted({path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py")})
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name_of(path: Path) -> str:
    """A file as it is called in messages."""
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(number of leading dots, module) of everything that a file imports, wherever it does.

    A relative module is spelled from the root of the package: `..kernels` in runner is `kernels`.
    """
    folder = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = list(folder[: len(folder) - node.level + 1]) if node.level else []
            for alias in node.names:
                yield node.level, ".".join([*above, *filter(None, [node.module]), alias.name])


def is_within(module: str, allowed: tuple[str, ...]) -> bool:
    """Whether a module is one of the allowed names or lies below one."""
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_source_imports_only_what_lies_below_it(path: Path) -> None:
    allowed = MAY_IMPORT.get(name_of(path.parent)) or MAY_IMPORT[path.relative_to(ROOT).parts[0]]
    wrong = [module for level, module in imports(path) if level and not is_within(module, allowed)]
    assert not wrong


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_source_names_no_module_of_the_package_absolutely(path: Path) -> None:
    assert not [module for _, module in imports(path) if is_within(module, ("segattn",))]


@pytest.mark.parametrize("path", sorted((ROOT / "kernels/plan").glob("*.py")), ids=name_of)
def test_a_plan_is_numpy_only(path: Path) -> None:
    allowed: tuple[str, ...] = (
        "kernels.plan", "kernels.sizes", "kernels.arrays", "reference.paging",
    )  # fmt: skip
    if name_of(path) == "kernels/plan/window_plan.py":
        allowed = (*allowed, "kernels.device.prefill.window_segments")
    wrong = [module for level, module in imports(path) if level and not is_within(module, allowed)]
    assert not wrong
    outside = {module.split(".")[0] for level, module in imports(path) if not level}
    assert outside <= {"ml_dtypes", "numpy", *sys.stdlib_module_names}


@pytest.mark.parametrize("path", sorted((ROOT / "kernels/device").rglob("*.py")), ids=name_of)
def test_device_code_knows_neither_host_nor_plan(path: Path) -> None:
    allowed = ("kernels.device", "kernels.backend", "kernels.sizes", "reference")
    wrong = [module for level, module in imports(path) if level and not is_within(module, allowed)]
    assert not wrong


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("*.py")), ids=name_of)
def test_only_what_prepares_a_launch_imports_device_code(path: Path) -> None:
    if not path.stem.startswith("launch_"):
        assert not [module for _, module in imports(path) if is_within(module, ("kernels.device",))]


@pytest.mark.parametrize("path", BENCHMARKS + TESTS, ids=name_of)
def test_the_top_floor_imports_the_package_under_its_name(path: Path) -> None:
    assert not [module for level, module in imports(path) if level]


@pytest.mark.parametrize("path", BENCHMARKS, ids=name_of)
def test_a_benchmark_imports_no_test(path: Path) -> None:
    assert not [module for _, module in imports(path) if is_within(module, ("segattn.tests",))]


@pytest.mark.parametrize("path", SOURCES + BENCHMARKS, ids=name_of)
def test_only_the_backend_imports_the_real_nki(path: Path) -> None:
    if name_of(path) == "kernels/backend.py":
        return
    assert not [
        module for level, module in imports(path) if not level and is_within(module, ("nki",))
    ]
