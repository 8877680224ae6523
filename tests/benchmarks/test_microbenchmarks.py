"""The microbenchmark sheet recovers the constants that produced its times."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from segattn.benchmarks.kernels import command as kernels
from segattn.benchmarks.kernels.targets import Target
from segattn.benchmarks.kernels.workloads import CacheWrite
from segattn.benchmarks.microbenchmarks import command as microbenchmark_command
from segattn.benchmarks.microbenchmarks import micro_kernels_nki
from segattn.benchmarks.microbenchmarks.command import modelled_runner, run_findings, run_sheet
from segattn.benchmarks.microbenchmarks.sheet import SHEET, Arguments, Array, Experiment
from segattn.cli import main
from segattn.reference import nki
from segattn.reference.nki.cost.constants import BASE, CostConstants

EXACT = (
    "interleaved_groups_in_one_bank_are_exact",
    "psum_accumulates_over_loop_trips",
    "exp_of_minus_30000_is_zero",
)

HIDDEN: dict[str, float] = {
    "scalar_overhead_cycles": 224,
    "tensor_overhead_cycles": 16,
    "dma_transpose_sbuf": 0.45,
    "gather_descriptor_cycles": 13,
    "dma_issue_ns": 700,
    "hbm_rate": 300,
    "loop_iteration_ns": 3500,
    "vector_overhead_cycles": 40,
}
SHORT = tuple(replace(e, counts=(16, 32)) for e in SHEET if not e.device_only)


@pytest.mark.parametrize("experiment", SHORT, ids=[e.name for e in SHORT])
def test_the_fit_finds_the_constants_behind_the_times(experiment: Experiment) -> None:
    # Runs as short as these end within the ramp.
    hidden = modelled_runner(BASE.with_measured({**HIDDEN, "tensor_ramp_ns": 0}))
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
    assert main(["bench", "microbenchmarks", "--out", str(path)]) == 0
    assert json.loads(path.read_text())["kind"] == "modelled"
    assert CostConstants.from_results(path).scalar_overhead_cycles == pytest.approx(64)


def test_kernels_are_modelled_with_what_a_results_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "TARGETS", (Target(CacheWrite(128), 0.0, "hbm"),))

    def modelled_us(measured: dict[str, float]) -> float:
        path, out = tmp_path / "measured.json", tmp_path / "kernels.json"
        path.write_text(json.dumps({"kind": "measured", "constants": measured}))
        assert main(["bench", "kernels", "--constants", str(path), "--out", str(out)]) == 0
        shown = "".join(capsys.readouterr().out.split())
        assert all(f"{name}={value:g}" in shown for name, value in measured.items())
        (row,) = json.loads(out.read_text())["rows"]
        return float(row["us"]["base"])

    # The write is a handful of DMAs, one after the other for each cache.
    assert modelled_us({"dma_first_byte_ns": 100_000}) > modelled_us({}) + 100
    assert main(["bench", "kernels", "--constants", str(tmp_path / "absent.json")]) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no JSON"),
        ("[]", 'an object "constants"'),
        ("{}", 'an object "constants"'),
        ('{"constants": 3}', 'an object "constants"'),
        ('{"constants": {"hbm": 3}}', "constant 'hbm' is unknown"),
        ('{"constants": {"hbm_rate": "fast"}}', "'fast'; allowed: a finite number >= 0"),
        ('{"constants": {"hbm_rate": NaN}}', "nan; allowed: a finite number >= 0"),
        ('{"constants": {"hbm_rate": Infinity}}', "inf; allowed: a finite number >= 0"),
        ('{"constants": {"hbm_rate": true}}', "True; allowed: a finite number >= 0"),
        ('{"constants": {"hbm_rate": 0}}', "'hbm_rate' is 0; allowed: a number above 0"),
    ],
)
def test_a_file_without_usable_constants_is_refused_by_name(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    assert main(["bench", "kernels", "--constants", str(path)]) == 2
    printed = capsys.readouterr().err
    assert str(path) in printed
    assert message in printed


def test_an_unknown_experiment_names_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "microbenchmarks", "--only", "sleep"]) == 2
    assert "gather_transpose" in capsys.readouterr().err


def test_findings_tell_kept_from_flushed_denormals_and_exact_from_mixed_groups() -> None:
    def on_interpreter(kernel: str, arguments: Arguments) -> Array:
        # What these rules forbid is what two of the kernels ask a device.
        with nki.strict(psum_chains="off", loop_psum="off"):
            result: Array = getattr(micro_kernels_nki, kernel)(**arguments)
        return result

    found = run_findings(on_interpreter)
    assert [found.pop(name) for name in EXACT] == [True] * 3
    assert not any(found.values())  # the interpreter keeps denormals

    zeros = run_findings(lambda kernel, arguments: np.zeros((128, 256), np.float32))
    assert [zeros.pop(name) for name in EXACT] == [False, False, True]
    assert all(zeros.values())


@pytest.mark.parametrize(
    ("name", "times", "answer"),
    [
        ("row_tiles", {512: 107.0}, True),
        ("row_tiles", {512: 213.0}, False),
        ("loop_load", {0: 2000.0, 1: 6000.0, 2: 7000.0, 3: 7500.0}, True),
        ("loop_load", {0: 2000.0, 1: 6000.0, 2: 7000.0, 3: 11000.0}, False),
        ("transpose_load", {1: 1000.0, 2: 1500.0, 3: 1600.0}, True),
        ("transpose_load", {1: 1000.0, 2: 1500.0, 3: 2500.0}, False),
        ("sustained", {8: 8 * 15e3, 20000: 20000 * 20e3}, True),
        ("sustained", {8: 8 * 15e3, 20000: 20000 * 15e3}, False),
    ],
)
def test_times_answer_what_no_constant_holds(
    name: str, times: dict[int, float], answer: bool
) -> None:
    (experiment,) = (each for each in SHEET if each.name == name)
    assert list(experiment.answers(times).values()) == [answer]


def test_the_sustained_matmuls_are_those_of_one_trip() -> None:
    (experiment,) = (each for each in SHEET if each.device_only)
    arguments = experiment.arguments(2, 1)
    out = micro_kernels_nki.sustained_matmul_kernel(**arguments)
    x = arguments["x"].astype(np.float64)
    np.testing.assert_allclose(out, x[:, :128].T @ x[:, 256:], rtol=1e-4, atol=1e-3)


def test_the_model_lets_loads_pass_the_edges_of_a_loop() -> None:
    (experiment,) = (each for each in SHORT if each.name == "loop_load")
    assert run_sheet(modelled_runner(), [experiment])["findings"] == {
        "loads_overlap_loop_edges": True
    }
