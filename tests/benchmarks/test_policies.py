"""The policy simulation: its clock, its percentiles, and what policies do in it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from segattn.benchmarks.scheduler.arrivals import Arrival, read_workload, synthetic
from segattn.benchmarks.scheduler.policies import POLICIES, StepCosts, percentile, simulate
from segattn.cli import main
from segattn.scheduler import NeuronPolicy, SchedulerConfig

COSTS = StepCosts(fixed_ms=1.0, prefill_token_ms=0.5, decode_row_ms=2.0)


def _config(**more: int) -> SchedulerConfig:
    given: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_model_len": 16,
        "block_size": 4,
        "num_blocks": 17,
    } | more
    return SchedulerConfig(**given, num_batched_tokens_buckets=[4, 8])


def test_the_clock_adds_the_cost_of_each_padded_step() -> None:
    # Prefill of 3 tokens in a bucket of 4: 1 + 2 ms; two decodes of one row: 1 + 2 ms each.
    outcome = simulate(_config(), NeuronPolicy(), [Arrival(0.5, 3, 3)], COSTS)
    assert outcome.first_token_ms == [3.0]
    assert outcome.gaps_ms == [3.0, 3.0]
    assert outcome.end_ms == 500 + 9.0
    assert (outcome.rows, outcome.tokens) == (6, 5)
    assert outcome.row()["padding"] == pytest.approx(1 / 6)
    assert outcome.row()["longest_gap_ms"] == 3.0


def test_two_requests_wait_for_each_other_as_the_phases_demand() -> None:
    # Prefill A 3 ms, prefill B 3 ms (A waits), then decodes of two rows of 1 + 4 ms.
    arrivals = [Arrival(0.0, 4, 2), Arrival(0.001, 4, 2)]
    outcome = simulate(_config(), NeuronPolicy(), arrivals, COSTS)
    assert outcome.first_token_ms == [3.0, 5.0]
    assert outcome.gaps_ms == [8.0, 5.0]


def test_a_decode_turn_shortens_the_longest_gap() -> None:
    arrivals = [Arrival(0.0, 4, 8), *(Arrival(0.001, 4, 1) for _ in range(20))]
    gap = {
        limit: simulate(
            _config(), NeuronPolicy(max_consecutive_prefills=limit), arrivals, COSTS
        ).row()["longest_gap_ms"]
        for limit in (None, 1)
    }
    # All 20 prompts of 3 ms first, or one of them between two decodes; 3 ms for the decode.
    assert gap == {None: 63.0, 1: 6.0}


def test_reserved_admission_runs_more_short_requests_at_once() -> None:
    arrivals = [Arrival(0.0, 4, 4) for _ in range(8)]
    peak = {
        admission: simulate(
            _config(num_blocks=9), NeuronPolicy(kv_admission=admission), arrivals, COSTS
        ).row()["concurrency"]
        for admission in ("worst_case", "reserved")
    }
    # 8 usable blocks: two of 4 blocks at worst, or four (max_num_seqs) of 2 blocks.
    assert peak["reserved"] > 1.5 * peak["worst_case"]


def test_a_deadlock_of_the_documented_policy_is_reported_not_awaited() -> None:
    config = SchedulerConfig(2, 4, 3, 3, 2)
    arrivals = [Arrival(0.0, 1, 2), Arrival(0.0, 1, 2)]
    assert simulate(config, NeuronPolicy.documented(), arrivals, COSTS).num_unfinished == 2
    assert simulate(config, NeuronPolicy(), arrivals, COSTS).num_unfinished == 0


@pytest.mark.parametrize(("percent", "expected"), [(50, 2.0), (75, 3.0), (99, 4.0), (0, 1.0)])
def test_percentiles_are_values_that_occurred(percent: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == expected
    assert percentile([], percent) == 0.0


def test_a_workload_is_read_in_order_of_arrival_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "workload.jsonl"
    path.write_text(
        '{"arrival_s": 2.0, "prompt_tokens": 5, "output_tokens": 1}\n'
        '{"arrival_s": 1.0, "prompt_tokens": 6, "output_tokens": 2}\n'
    )
    assert read_workload(path) == [Arrival(1.0, 6, 2), Arrival(2.0, 5, 1)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"arrival_s": 2.0, "prompt": 5}', " unknown key 'prompt', must be one of"),
        ("[1, 2, 3]", " is [1, 2, 3], must be a JSON object"),
        ('{"arrival_s": 2.0, ', "Expecting"),
        ('{"arrival_s": -1, "prompt_tokens": 5, "output_tokens": 1}', "arrival_s=-1: must be"),
        ('{"arrival_s": 1, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens=0: must be"),
        ('{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 1.5}', "output_tokens=1.5: must"),
        ('{"arrival_s": true, "prompt_tokens": 5, "output_tokens": 1}', "arrival_s=True: must be"),
    ],
)
def test_a_bad_line_of_a_workload_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "workload.jsonl"
    good = '{"arrival_s": 2.0, "prompt_tokens": 5, "output_tokens": 1}'
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match=f":2.*{re.escape(message)}"):
        read_workload(path)
    assert main(["policies", "--workload", str(path)]) == 2


def test_reasons_of_waiting_are_summed_over_the_steps() -> None:
    # Three arrive with a seat for one. While the first has its prefill and its decode, the second
    # waits for the prefill of the step, then for the seat, and the third behind it; then the third
    # waits for the same two.
    arrivals = [Arrival(0.0, 4, 2) for _ in range(3)]
    outcome = simulate(_config(max_num_seqs=1), NeuronPolicy(), arrivals, COSTS)
    assert outcome.waiting == {"prefill_batch": 2, "max_num_seqs": 2, "behind": 2}


def test_the_tables_fit_80_columns_and_name_every_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["policies", "--requests", "3", "--rate", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for name in POLICIES:
        times, reasons = (line for line in lines if line.startswith(f"{name} "))
        assert len(times.split()) >= 10
        assert len(reasons.split()) >= 3
    assert main(["policies", "--requests", "3", "--rate", "100", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["policy"] for row in rows] == list(POLICIES)
    assert all(row["not_served"] == 0 and row["waiting"] for row in rows)
    for options in (["--requests", "0"], ["--rate", "0"]):
        assert main(["policies", *options]) == 2


def test_a_seed_gives_the_same_arrivals() -> None:
    assert synthetic(20, 4.0, 1) == synthetic(20, 4.0, 1)
    assert synthetic(20, 4.0, 1) != synthetic(20, 4.0, 2)
