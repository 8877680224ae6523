"""Level 2 of the lint against every construct that the reading of the open front end names."""

import pytest

from segattn.reference.nki.lint import lint_source
from segattn.tests.nki.lint_cases import Construct, read_constructs

TABLES = ("statements", "functions", "expressions", "builtins", "references", "differences")


def rules(construct: Construct, level: int) -> set[str]:
    findings = lint_source(construct.source)
    return {item.rule for item in findings if item.kind.level == level}


def decided(name: str) -> list[Construct]:
    return [item for item in read_constructs(name) if not item.verdict.startswith("not decided")]


def check(construct: Construct) -> None:
    """Assert that the lint's verdict is the table's."""
    if construct.verdict.startswith("level 1 "):
        assert construct.verdict.removeprefix("level 1 ") in rules(construct, level=1)
    else:
        expected = set() if construct.verdict == "accepted" else {construct.verdict}
        assert rules(construct, level=2) == expected
        assert "syntax" not in rules(construct, level=1)


@pytest.mark.parametrize("construct", decided("statements"), ids=str)
def test_statements(construct: Construct) -> None:
    check(construct)


@pytest.mark.parametrize("construct", decided("functions"), ids=str)
def test_functions_and_calls(construct: Construct) -> None:
    check(construct)


@pytest.mark.parametrize("construct", decided("expressions"), ids=str)
def test_expressions(construct: Construct) -> None:
    check(construct)


@pytest.mark.parametrize("construct", decided("builtins"), ids=str)
def test_methods_and_builtin_functions(construct: Construct) -> None:
    check(construct)


@pytest.mark.parametrize("construct", decided("references"), ids=str)
def test_what_a_kernel_refers_to_outside_of_itself(construct: Construct) -> None:
    check(construct)


@pytest.mark.parametrize("construct", decided("differences"), ids=str)
def test_differences_from_cpython(construct: Construct) -> None:
    check(construct)


def test_what_is_not_decided_has_a_reason() -> None:
    verdicts = [item.verdict for name in TABLES for item in read_constructs(name)]
    reasons = [item.partition(": ")[2] for item in verdicts if item.startswith("not decided")]
    assert len(reasons) < len(verdicts) / 10
    assert all(len(reason.split()) > 3 for reason in reasons)


def test_every_finding_says_what_to_write_instead() -> None:
    silent = {
        item.rule
        for name in TABLES
        for construct in decided(name)
        for item in lint_source(construct.source)
        if item.kind.level and not item.replacement
    }
    assert silent == set()
