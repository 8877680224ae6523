"""Level 2 of the lint: what the open KLR front end rejects or evaluates differently."""

import pytest

from segattn.tests.nki.lint_cases import Case, assert_case, read_cases, reports

SHADOWED = """
def round(n):
    return n

@nki.jit
def kernel(x, n):
    n = round(n)
    nisa.memset(x, value=n)
"""


@pytest.mark.parametrize("case", read_cases("statements"), ids=str)
def test_statements_of_the_open_front_end(case: Case) -> None:
    assert_case(case, level=2)


@pytest.mark.parametrize("case", read_cases("expressions"), ids=str)
def test_expressions_of_the_open_front_end(case: Case) -> None:
    assert_case(case, level=2)


@pytest.mark.parametrize("case", read_cases("calls"), ids=str)
def test_builtins_methods_and_libraries_of_the_open_front_end(case: Case) -> None:
    assert_case(case, level=2)


def test_a_function_of_the_file_is_not_taken_for_the_builtin_of_its_name() -> None:
    assert reports(SHADOWED, level=2) == []
