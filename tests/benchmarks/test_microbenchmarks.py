"""The microbenchmark sheet recovers the constants that produced its times."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from segattn.benchmarks import micro_kernels_nki, microbenchmark_command
from segattn.benchmarks.microbenchmark_command import modelled_runner, run_findings, run_sheet
from segattn.benchmarks.microbenchmarks import SHEET, Arguments, Array, Experiment
from segattn.reference.nki.cost.constants import BASE, CostConstants

HIDDEN: dict[str, float] = {
    "scalar_overhead_cycles": 224,
    "tensor_overhead_cycles": 16,
    "dma_transpose_sbuf": 0.45,
    "dma_transpose_hbm": 0.7,
    "dma_issue_ns": 860,
    "hbm_rate": 300,
    "loop_iteration_ns": 3500,
    "vector_overhead_cycles": 40,
}
SHORT = tuple(replace(e, counts=(16, 32)) for e in SHEET)


@pytest.mark.parametrize("experiment", SHORT, ids=[e.name for e in SHORT])
def test_the_fit_finds_the_constants_behind_the_times(experiment: Experiment) -> None:
    hidden = modelled_runner(BASE.with_measured(HIDDEN))
    found = run_sheet(hidden, [experiment])["constants"]
    for name, value in found.items():
        assert value == pytest.approx(HIDDEN[name], rel=0.02), name


def test_the_sheet_settles_every_hidden_constant() -> None:
    times = {point: 1000.0 for e in SHEET for point in e.points}
    fitted = {name for e in SHEET for name in e.fit(times)}
    assert fitted == set(HIDDEN)


def test_the_results_file_feeds_the_cost_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(microbenchmark_command, "SHEET", SHORT[:1])
    path = tmp_path / "results.json"
    assert microbenchmark_command.main(["--out", str(path)]) == 0
    assert json.loads(path.read_text())["kind"] == "modelled"
    assert CostConstants.from_results(path).scalar_overhead_cycles == pytest.approx(64)


def test_findings_tell_kept_from_flushed_denormals_and_exact_from_mixed_groups() -> None:
    def on_interpreter(kernel: str, arguments: Arguments) -> Array:
        result: Array = getattr(micro_kernels_nki, kernel)(**arguments)
        return result

    found = run_findings(on_interpreter)
    groups = found.pop("interleaved_groups_in_one_bank_are_exact")
    assert groups
    assert not any(found.values())  # the interpreter keeps denormals

    zeros = run_findings(lambda kernel, arguments: np.zeros((128, 256), np.float32))
    assert not zeros.pop("interleaved_groups_in_one_bank_are_exact")
    assert all(zeros.values())
