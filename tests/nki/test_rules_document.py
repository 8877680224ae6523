"""docs/interpreter.md lists the rules that exist, with their defaults; its example runs."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from segattn.reference.nki import DEFAULT_LEVELS
from segattn.reference.nki.rules import FIELD_RULES

TEXT = (Path(__file__).parents[2] / "docs" / "interpreter.md").read_text()


def test_the_table_of_rules_is_complete_and_right() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| .+ \|$", TEXT, re.MULTILINE)
    assert dict(rows) == {r: at for r, at in DEFAULT_LEVELS.items() if r not in FIELD_RULES}


def test_the_example_runs_as_written(tmp_path: Any) -> None:
    source = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]
    example = tmp_path / "example.py"
    example.write_text(source)
    names: dict[str, Any] = {}
    exec(compile(source, str(example), "exec"), names)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(names["scale_kernel"](x), 2 * x)
