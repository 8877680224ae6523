"""The examples run and agree with the reference; those that need a framework: tests/frameworks."""

import re
import runpy
from pathlib import Path

import pytest

from segattn.tests.frameworks.examples import FRAMEWORK_EXAMPLES

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = {path.name for path in FOLDER.glob("*.py")}


@pytest.mark.parametrize("name", sorted(EXAMPLES - FRAMEWORK_EXAMPLES.keys()))
def test_an_example_prints_an_error_of_rounding(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = runpy.run_path(str(FOLDER / name))
    if name == "own_runner.py":
        assert names["tokens"] == names["expected"]
        assert capsys.readouterr().out.endswith(", as without a cache\n")
    else:
        assert 0 < names["error"] < (5e-3 if name == "aws_call.py" else 1e-5)
        assert f"{names['error']:.1e}" in capsys.readouterr().out


def test_the_page_on_the_kernels_links_every_example() -> None:
    page = (FOLDER.parent / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\(\.\./examples/(\w+\.py)\)", page)) == EXAMPLES
