"""The kernels are named in the field's words."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "kernels"
FILES = sorted(ROOT.rglob("*.py"))
OLD = {
    "share", "shares", "macro", "macros", "beside", "turn", "turns", "turned", "chain", "chains",
    "span", "spans", "section", "sections", "lane", "lanes",
}  # fmt: skip
"""Words that this project once made up, for q_group, kv_tile, background, transpose and segment."""
OF_OTHERS = {"shares_memory"}
"""NumPy's name."""


def words_of(path: Path) -> set[str]:
    """The words that the identifiers of a file are made of, in lower case.

    Keywords of calls are the callee's.
    """
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for field in ("id", "attr", "arg", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str) and not isinstance(node, ast.keyword):
                names.add(name)
    spaced = [re.sub("([a-z])([A-Z])", r"\1_\2", name).lower() for name in names - OF_OTHERS]
    return {word for name in spaced for word in name.split("_")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_identifier_has_an_old_word(path: Path) -> None:
    assert not words_of(path) & OLD


@pytest.mark.parametrize("path", sorted((ROOT / "device").rglob("*.py")), ids=lambda p: p.name)
def test_device_code_leaves_steps_to_the_scheduler(path: Path) -> None:
    assert not words_of(path) & {"step", "steps"}


def test_the_words_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("class BigShare:\n    def turn_it(self, x):\n        y.span = f(step=x)\n")
    assert {"big", "share", "turn", "it", "x", "y", "span", "f"} <= words_of(file)
    assert "step" not in words_of(file)
