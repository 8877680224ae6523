"""The scheduler benchmark: its arithmetic, and that it measures the steps it names."""

import sys

import pytest

from segattn.benchmarks.scheduler.command import Ours, Run, _fastest, drive
from segattn.benchmarks.scheduler.workloads import Workload, workloads
from segattn.cli import main
from segattn.scheduler import SchedulerConfig

CONFIG = SchedulerConfig(4, 16, 64, 4, 65)


def test_the_fastest_time_of_each_step_counts() -> None:
    # Steps of 1 and 2 seconds at best, over 6 request-steps: half a second each.
    runs = [Run([1.0, 5.0], 6, []), Run([4.0, 2.0], 6, [])]
    assert _fastest(runs) == 0.5e6


def test_steps_before_the_measurement_are_decided_but_not_timed() -> None:
    workload = Workload("two decodes", CONFIG, [[1] * 4, [2] * 4], 9, None, 3, 4)
    measured = drive(Ours("base", CONFIG), workload)
    assert len(measured.decisions) == 3 + 4
    assert len(measured.seconds) == 4
    assert measured.num_request_steps == 2 * 4


def test_all_prompts_are_computed_before_the_measurement() -> None:
    # A Neuron kind computes one prompt in a step; four of them, and a decode turn behind them.
    workload = Workload("decodes", CONFIG, [[number] * 4 for number in range(4)], 9, None, 2, 3)
    measured = drive(Ours("neuron", CONFIG), workload)
    kinds = ["prefill" if decision[1] else "decode" for decision in measured.decisions]
    assert kinds == ["prefill"] * 4 + ["decode"] * 4
    assert measured.num_request_steps == 3 * 4


def test_a_warm_prompt_makes_the_others_hit() -> None:
    workload = Workload("hits", CONFIG, [[1] * 12 + [2]], 1, warm=[1] * 12)
    measured = drive(Ours("base", CONFIG), workload)
    new = [one for decision in measured.decisions for one in decision[1]]
    assert [(request_id, hit) for request_id, hit, _ in new] == [("r0", 12)]
    # The additions are timed: one entry more than steps.
    assert len(measured.seconds) == len(measured.decisions) + 1


def test_arrivals_come_in_every_step_and_are_timed() -> None:
    workload = Workload("arrivals", CONFIG, [[1] * 4], 9, None, 1, 3, num_arrivals=1)
    measured = drive(Ours("base", CONFIG), workload)
    new = [[name for name, *_ in decision[1]] for decision in measured.decisions]
    assert new == [["r0"], ["a1-0"], ["a2-0"], ["a3-0"]]
    assert len(measured.seconds) == 3


def test_nothing_but_the_aborts_is_timed() -> None:
    workload = Workload(
        "aborts", CONFIG, [[1] * 4] * 3, 9, None, 2, max_steps=2, num_waiting=20, num_aborts=1
    )
    side = Ours("base", CONFIG)
    measured = drive(side, workload)
    assert (len(measured.seconds), measured.num_request_steps) == (2, 2)
    # The first one that runs is gone before each step.
    assert [name for name in side.scheduler.requests if name[0] == "r"] == ["r2"]
    assert len(measured.decisions) == 2 + 1


def test_all_lines_of_the_target_are_measured() -> None:
    names = [workload.name for workload in workloads()]
    assert len(names) == len(set(names)) == 2 * (4 + 2) + 3 + 2 * 3
    assert {workload.config.block_size for workload in workloads()} == {16, 128}


def test_without_vllm_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert main(["bench", "scheduler"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: 'vllm' is not installed: pip install 'segattn[vllm]' brings it\n"
