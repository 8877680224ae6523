"""What the README claims can be run."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from segattn.cli import COMMANDS
from segattn.reference import attention

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_example_gives_the_attention_that_it_names() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    q, k, v = names["q"], names["k"], names["v"]
    cache = np.zeros((0, 2, 16, 64)), np.zeros((0, 2, 16, 64))
    # One chunk of 21 tokens without cache: rows 0..19 are the prefill, row 20 is the decode.
    expected = attention.segmented_attention(q, k, v, *cache, np.zeros(0, np.int32), 0, 21)
    np.testing.assert_allclose(names["out"][:, :20], expected[:, :20], atol=1e-5)
    np.testing.assert_allclose(names["step"][0, :, 0], expected[:, 20], atol=1e-5)


def test_every_make_target_and_command_in_it_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for command in re.findall(r"segattn ([a-z]+)\b", README):
        assert command in {*COMMANDS, "completion"}, command
