"""The examples that need torch or JAX."""

import runpy
from pathlib import Path

import pytest

from segattn.tests.frameworks.examples import FRAMEWORK_EXAMPLES


@pytest.mark.parametrize("name", FRAMEWORK_EXAMPLES)
def test_an_example_prints_an_error_of_rounding(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = runpy.run_path(str(Path(__file__).parents[2] / "examples" / name))
    assert 0 < names["error"] < FRAMEWORK_EXAMPLES[name]
    assert f"{names['error']:.1e}" in capsys.readouterr().out
