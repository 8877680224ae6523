"""The lint: removed and deprecated names, keywords, orders and constants."""

import re

import pytest

from segattn.reference import nki
from segattn.reference.nki import changes as tables
from segattn.tests.nki.lint_cases import Case, assert_case, read_cases


@pytest.mark.parametrize("case", read_cases("api"), ids=str)
def test_api_that_is_gone_or_misused_is_reported_with_its_replacement(case: Case) -> None:
    assert_case(case)


def test_replacements_name_what_the_api_has() -> None:
    changes = [tables.REMOVED, tables.UNSUPPORTED, tables.DEPRECATED, tables.HOST]
    texts = [change.replacement for table in changes for change in table.values()]
    texts += [change.replacement for change in tables.REMOVED_KEYWORDS.values()]
    texts += [*tables.ABSENT.values(), *tables.ABSENT_OF_TENSORS.values()]
    roots = {"nl": nki.language, "nisa": nki.isa, "ncc": nki.collectives, "nki": nki}
    named = {match for text in texts for match in re.findall(r"\b(nl|nisa|ncc|nki)\.(\w+)", text)}
    assert {name for root, name in named if not hasattr(roots[root], name)} == {"meta"}
    assert len(named) > 20
    methods = {name for text in texts for name in re.findall(r"(?:^|\s)\.(\w+)", text)}
    assert methods
    assert all(hasattr(nki.language.NkiTensor, name) for name in methods)
