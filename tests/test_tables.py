"""Every table that a command prints fits 80 columns, unless --wide asks for more."""

import json
from pathlib import Path

import pytest

from segattn.reference.nki.install import uninstall
from segattn.tests.command import segattn
from segattn.tests.runner.model_files import write_gguf
from segattn.tests.runner.random_model import random_weights
from segattn.tests.runner.steps import DECODE, report_of, step

ROOT = Path(__file__).parents[1]
KERNEL = """
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def a_kernel_whose_name_is_long_enough_to_push_all_columns_out_of_the_window(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=x)
    return out


def reference(x):
    return x
"""
NAME = "k.py::a_kernel_whose_name_is_long_enough_to_push_all_columns_out_of_the_window"
COMMANDS = {
    "generate": "generate the --model m.gguf --max-model-len 64 --max-tokens 2",
    "buckets": "buckets report.json --max-buckets 2",
    "policies": "policies --requests 3",
    "fuzz": "fuzz --kind base --minutes 0",
    "explore": "explore --requests 1 --max-model-len 2",
    "replay": f"replay {ROOT}/tests/data/traces/base.jsonl.gz",
    "bench run": f"bench run {NAME} --shape x=128,64 --check k.py::reference --stalls 3",
    "bench kernels": "bench kernels --rows 128 --heads 1 --head-dim 64 --stalls 3",
    "bench footprint": "bench footprint --samples 1 --kernel write_kv_cache",
    "bench interpreter": "bench interpreter --rounds 1",
    "bench microbenchmarks": "bench microbenchmarks",
    "trace": f"trace --stalls 3 {ROOT}/examples/raw_kernel.py",
}
PLAIN = ("buckets", "policies", "explore", "replay", "bench microbenchmarks")
"""These print no rule of dashes, and all of their lines are short."""


@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_longer_than_80_columns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "k.py").write_text(KERNEL)
    (tmp_path / "report.json").write_text(json.dumps(report_of([step(), DECODE])))
    if name == "generate":
        write_gguf(tmp_path / "m.gguf", random_weights())
    try:
        result = segattn(*COMMANDS[name].split())
    finally:
        uninstall()
    assert result.status == 0, result.err
    lines = result.out.splitlines()
    rules = [number for number, line in enumerate(lines) if set(line) == {"-", " "}]
    rows = [line for number in rules for line in _table(lines, number)]
    assert rows or name in PLAIN
    rows += lines if name in PLAIN else []
    assert [line for line in rows if len(line) > 80] == []


def _table(lines: list[str], rule: int) -> list[str]:
    """The heads, the rule and the rows around a rule of dashes."""
    end = next((n for n in range(rule, len(lines)) if not lines[n]), len(lines))
    return [line for line in lines[max(0, rule - 3) : end] if "  " in line]
