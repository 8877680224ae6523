"""Level 1 of the lint: removed and deprecated names, keywords, orders and constants."""

import pytest

from segattn.tests.nki.lint_cases import Case, assert_case, read_cases


@pytest.mark.parametrize("case", read_cases("api"), ids=str)
def test_api_that_is_gone_or_misused_is_reported_with_its_replacement(case: Case) -> None:
    assert_case(case, level=1)
