"""The commit hook, and the tool behind `make test-oldest`."""

import tomllib

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
