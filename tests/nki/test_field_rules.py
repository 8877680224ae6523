"""Each rule from the field refuses its illegal kernel and lets the legal twin pass."""

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki import DEFAULT_LEVELS
from segattn.reference.nki.rules import FIELD_RULES, TABLE, explain
from segattn.reference.nki.rules.document import document
from segattn.reference.nki.strict import Level
from segattn.tests.nki import field_rule_cases_compute, field_rule_cases_dma, field_rule_forms
from segattn.tests.nki.field_rule_cases import CASES, Case

MODULES = field_rule_cases_compute, field_rule_cases_dma, field_rule_forms  # they add to CASES

OFF: Level = "off"
WARN: Level = "warn"
ERROR: Level = "error"
DOCS = Path(__file__).parents[2] / "docs"
named = pytest.mark.parametrize("case", CASES, ids=[f"{c.rule}-{c.kernel.__name__}" for c in CASES])


def launch(case: Case, *, bad: bool) -> Any:
    kernel = nki.jit(case.kernel)
    inputs = [np.array(x) for x in (case.inputs if bad else case.legal)]
    return (kernel[2] if case.cores == 2 else kernel)(*inputs, bad)


@named
def test_the_illegal_kernel_is_refused_with_line_value_limit_and_code(case: Case) -> None:
    row = next(row for row in TABLE if row.name == case.rule)
    with (
        nki.strict(field="error", scatter_duplicate="error"),
        pytest.raises(nki.NkiValidationError) as refused,
    ):
        launch(case, bad=True)
    text = str(refused.value)
    assert re.search(case.says, text)
    assert re.search(r"\(at .*\w+\.py:\d+\)", text)
    if row.level:
        assert text.endswith(f"[rule {', '.join((row.name, *row.codes))}]")


@named
def test_by_default_the_illegal_kernel_is_not_silent(case: Case) -> None:
    row = next(row for row in TABLE if row.name == case.rule)
    if row.level == "off":
        assert row.confidence == "low"
        return
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if "error" in (row.level, DEFAULT_LEVELS.get(row.enforced)) or row.enforced == "always":
            with pytest.raises(nki.NkiValidationError, match=case.says):
                launch(case, bad=True)
        else:
            launch(case, bad=True)
            assert any(re.search(case.says, str(warning.message)) for warning in seen)


@named
def test_the_legal_twin_passes(case: Case) -> None:
    with nki.strict(field="error"):
        launch(case, bad=False)


@named
def test_the_rule_is_asked_again_by_a_launch_that_is_stricter(case: Case) -> None:
    """Whatever the launch before has validated and kept."""
    row = next(row for row in TABLE if row.name == case.rule)
    rule = row.name if row.level else row.enforced
    if rule == "always":
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for level in OFF, WARN:
            with nki.strict(None, **{rule: level}):
                launch(case, bad=True)
    with nki.strict(None, **{rule: ERROR}), pytest.raises(nki.NkiValidationError, match=case.says):
        launch(case, bad=True)


def test_every_row_has_a_case() -> None:
    """But those that are legal now."""
    legal = {row.name for row in TABLE if row.enforced.startswith("nothing")}
    assert legal == {"python_of_0_6"}
    assert {case.rule for case in CASES} == {row.name for row in TABLE} - legal


def test_the_document_is_the_table() -> None:
    assert (DOCS / "field_rules.md").read_text() == document()


def test_the_level_of_all_field_rules_and_of_one_beside_it() -> None:
    with nki.strict(field="off", nested_loops="error"):
        levels = {rule: nki.level(rule) for rule in FIELD_RULES}
    assert levels.pop("nested_loops") == "error"
    assert set(levels.values()) == {"off"}
    with (
        pytest.raises(ValueError, match="'loud'; allowed: error, warn, off"),
        nki.strict(
            field="loud"  # type: ignore[arg-type]
        ),
    ):
        pass


def test_a_line_warns_once_per_launch() -> None:
    case = next(case for case in CASES if case.rule == "loop_psum")
    for _ in range(2):
        with pytest.warns(nki.NkiWarning) as seen:
            launch(case, bad=True)
        assert len(seen) == 1


def test_python_shows_a_line_once_for_all_launches() -> None:
    """The filter that Python starts with; "always" shows it once for each launch."""
    case = next(case for case in CASES if case.rule == "nested_loops")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            launch(case, bad=True)
    assert len(seen) == 1


def test_error_codes_are_explained() -> None:
    assert [row.name for row in explain("NCC_IBIR092")] == ["loop_psum"]
    command = [sys.executable, "-m", "segattn.reference.nki.rules"]
    shown = subprocess.run([*command, "NCC_IBIR092"], capture_output=True, text=True, check=True)
    assert "loop_psum" in shown.stdout
    assert "instead: allocate PSUM in the body" in shown.stdout
    unknown = subprocess.run([*command, "NCC_X"], capture_output=True, text=True, check=False)
    assert unknown.returncode == 1
    assert "nothing is known of NCC_X" in unknown.stdout
