"""The example in docs/scheduler.md does what the text says."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scheduler.md").read_text(encoding="utf-8")


def test_the_example_schedules_the_steps_that_it_describes() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "scheduler.md", "exec"), names)
    assert names["steps"] == [
        ("ACTIVE_PREFILL", {"a": 128}, {"a": 128}),
        ("ACTIVE_PREFILL", {"a": 72}, {"a": 128}),
        ("ACTIVE_PREFILL", {"b": 8}, {"b": 128}),
        ("ACTIVE_DECODE", {"a": 1, "b": 1}, {"a": 1, "b": 1}),
        ("ACTIVE_DECODE", {"a": 1}, {"a": 1}),
        ("IDLE", {}, {}),
    ]
    assert names["finished"] == {"a": "length", "b": "length"}


def test_every_file_that_it_names_exists() -> None:
    files = set(re.findall(r"`([a-z_]+\.py)`", PAGE))
    assert files <= {path.name for path in (ROOT / "scheduler").glob("*.py")}
    assert len(files) > 15
