"""The commit hook."""

import pytest

from segattn.tests.checks.commit_subject import problem


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
