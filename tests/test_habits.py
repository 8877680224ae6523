"""The commit hook, the tool behind `make test-oldest`, and how many parameters functions have."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from segattn.tests.checks.commit_subject import problem
from segattn.tests.checks.lower_bounds import PROJECT, pinned, requirements


@pytest.mark.parametrize(
    ("subject", "found"),
    [
        ("feat: kernels take windows", None),
        ("Add windows", "must start with"),
        ("feat:windows", "must start with"),
        ("fix: " + "x" * 68, "has 73 characters"),
        ("fix: this; and that", "names more than one change"),
    ],
)
def test_a_commit_subject_has_one_prefix_and_one_change(subject: str, found: str | None) -> None:
    assert (problem(subject) or "").startswith(found or "")
    assert (problem(subject) is None) == (found is None)


def test_every_dependency_has_a_lower_bound_that_can_be_installed_exactly() -> None:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    lines = [*requirements(project, [*project["optional-dependencies"]])]
    assert {"numpy==1.26", "jinja2==3.1.6", "hypothesis==6.115"} <= set(map(pinned, lines))
    assert not [line for line in lines if line.startswith("segattn")]


def test_a_dependency_without_lower_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="'numpy': must be NAME>=VERSION"):
        pinned("numpy")


ROOT = Path(__file__).parents[1]
MOST_PARAMETERS = 8
LONGER = {
    "kernels/aws_segmented.py:attention_segmented_cte",
    "kernels/vllm_neuron.py:segmented_attention",
}
"""Signatures of AWS and of vLLM Neuron."""


def parameters(path: Path) -> Iterator[tuple[str, int]]:
    """Functions of a file with the number of their parameters, which self and cls are not.

    Not a kernel's: each HBM tensor is one, and the NEFF's inputs are named after them.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and not any(
            ast.unparse(decorator) == "nki.jit" for decorator in node.decorator_list
        ):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            own = [each for each in every if each.arg not in ("self", "cls")]
            yield f"{path.relative_to(ROOT).as_posix()}:{node.name}", len(own)


def test_a_function_has_at_most_eight_parameters() -> None:
    folders = ("kernels", "runner", "benchmarks", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    counts = {name: count for path in paths for name, count in parameters(path)}
    assert counts["kernels/launch_prefill.py:prepare_segmented_attention"] == MOST_PARAMETERS
    assert {name for name, count in counts.items() if count > MOST_PARAMETERS} == LONGER
