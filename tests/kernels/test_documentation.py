"""docs/kernels.md: its example and its ranges are those of the code; the kernels are lint clean."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segattn.cli import main
from segattn.kernels.backend import BACKENDS
from segattn.kernels.shape_checks import BLOCK_SIZES, HEAD_DIMS
from segattn.reference import attention

PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")


def test_the_example_attends_over_the_cached_tokens_and_the_chunk() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "kernels.md", "exec"), names)
    q, k, v, out = names["q"], names["k"], names["v"], names["out"]
    # The same 50 tokens as one chunk without cache: 20 cached ones, then the chunk's own 30.
    rows = np.concatenate([np.arange(100, 120), np.arange(30)])
    queries = np.concatenate([np.zeros((4, 20, 64)), q[:, :30]], axis=1)
    no_cache = np.zeros((0, 2, 16, 64))
    no_table = np.zeros(0, np.int32)
    expected = attention.segmented_attention(
        queries, k[:, rows], v[:, rows], no_cache, no_cache, no_table, 0, 50
    )
    np.testing.assert_allclose(out[:, :30], expected[:, 20:], atol=1e-5)
    assert not out[:, 30:].any()


def test_its_ranges_and_backends_are_those_of_the_code() -> None:
    sizes = f"d a multiple of {HEAD_DIMS.step} within {HEAD_DIMS[0]} .. {HEAD_DIMS[-1]};"
    assert sizes in PAGE
    assert f"block_size {', '.join(map(str, BLOCK_SIZES))};" in PAGE
    for backend in BACKENDS:
        assert f"| `{backend}`" in PAGE


def test_the_lint_finds_nothing_in_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(Path(__file__).parents[2] / "kernels")]) == 0
    assert capsys.readouterr() == ("", "0 errors, 0 warnings\n")
