"""Scheduler and model agree on random work, and the fuzzer finds and shrinks what does not."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from segattn.benchmarks.fuzz import command as fuzz
from segattn.benchmarks.fuzz.compare import Comparison, DeadlockError
from segattn.benchmarks.fuzz.coverage import FEATURES, Coverage
from segattn.benchmarks.fuzz.machine import KINDS, SchedulerMachine, machine
from segattn.benchmarks.fuzz.shrink import shrink
from segattn.benchmarks.fuzz.strategies import default_policies
from segattn.cli import main
from segattn.reference.scheduler_state import NeuronRules
from segattn.scheduler.block_pool import BlockPool
from segattn.scheduler.policy import NeuronPolicy
from segattn.scheduler.replay import replay
from segattn.scheduler.request_queue import FCFSRequestQueue
from segattn.scheduler.trace import read_traces

CONFIG: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "max_model_len": 16,
    "block_size": 4,
    "num_blocks": 9,
}


def run_rounds(machine_class: type[SchedulerMachine]) -> None:
    """Rounds of the fuzzer, more of them under a stronger Hypothesis profile."""
    for number in range(1 + settings().max_examples // 60):
        try:
            fuzz.run_round(machine_class, number)
        except Exception as error:  # any failure is shown as its smallest trace
            if machine_class.failure is None:
                raise
            trace, message = shrink(machine_class.failure)
            raise AssertionError(f"{message}: {trace}") from error


@pytest.mark.parametrize("kind", KINDS)
def test_scheduler_and_model_agree_on_every_step(kind: str) -> None:
    run_rounds(machine(kind, default_policies()))


@pytest.mark.parametrize("kind", KINDS[2:])
def test_scheduler_and_model_agree_under_the_documented_policy(kind: str) -> None:
    run_rounds(machine(kind, st.just(asdict(NeuronRules.documented()))))


def test_the_policies_of_model_and_scheduler_have_the_same_fields() -> None:
    assert asdict(NeuronRules()) == asdict(NeuronPolicy())
    assert asdict(NeuronRules.documented()) == asdict(NeuronPolicy.documented())


def test_the_command_passes_a_round_of_the_right_scheduler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "failure.jsonl.gz"
    assert main(["fuzz", "--minutes", "0", "--kind", "base", "--out", str(out)]) == 0
    assert "no difference" in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--minutes", "nan"], "--minutes=nan: must be a number of at least 0"),
        (["--minutes", "inf"], "--minutes=inf: must be"),
        (["--minutes=-1"], "--minutes=-1.0: must be"),
        (
            ["--out", "no/such.jsonl.gz"],
            "output 'no/such.jsonl.gz': cannot be written: No such file",
        ),
        (
            ["--record", "no/such.jsonl.gz"],
            "output 'no/such.jsonl.gz': cannot be written: No such file",
        ),
    ],
)
def test_the_command_refuses_what_it_could_only_find_out_at_its_end(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fuzz", *flags]) == 2
    assert reason in capsys.readouterr().err


def test_the_command_shrinks_a_fault_to_a_trace_that_replay_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "failure.jsonl.gz"
    with monkeypatch.context() as patch:
        patch.setattr(FCFSRequestQueue, "add_request", FCFSRequestQueue.prepend_request)
        assert main(["fuzz", "--minutes", "1", "--kind", "base", "--out", str(out)]) == 1
        (trace,) = read_traces(out)
        assert replay(trace) is not None
    # Two requests, and one event that shows their order.
    assert [event[0] for event in trace["events"][:2]] == ["add", "add"]
    assert len(trace["events"]) == 3
    assert replay(trace) is None
    assert "segattn replay" in capsys.readouterr().out


def test_a_broken_account_of_blocks_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Comparison("base", CONFIG, {})
    run.apply(["add", {"id": "a", "prompt": [5, 6], "max_tokens": 1}])
    run.apply(["schedule", 0])
    release = BlockPool.release

    def count_wrongly(self: BlockPool, blocks: list[int]) -> None:
        release(self, blocks)
        self.ref_counts[blocks[0]] = 1

    monkeypatch.setattr(BlockPool, "release", count_wrongly)
    with pytest.raises(RuntimeError, match=str(run.trace["events"][1][2]["new"][0][2][0])):
        run.apply(["abort", ["a"]])


def test_a_step_without_tokens_is_a_deadlock_under_the_default_policy() -> None:
    run = Comparison("neuron", CONFIG | {"max_num_seqs": 1}, {})
    run.apply(["add", {"id": "a", "prompt": [5, 6], "max_tokens": 3}])
    # Both sides are made to wait for ever, so that only the rule of progress can tell.
    run.model.model.rules = replace(run.model.model.rules, max_num_seqs=0)
    run.driver.scheduler.max_num_active_reqs = 0
    with pytest.raises(DeadlockError):
        run.apply(["schedule", 0])


def test_shrinking_removes_what_the_failure_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Comparison("base", CONFIG, {})
    for number in range(6):
        run.apply(["add", {"id": f"r{number}", "prompt": [5] * 9, "max_tokens": 4, "priority": 1}])
    run.apply(["abort", ["r2", "r3"]])
    trace = run.trace
    monkeypatch.setattr(FCFSRequestQueue, "add_request", FCFSRequestQueue.prepend_request)
    smallest, message = shrink(trace | {"events": [*trace["events"], ["schedule", 0, {}]]})
    assert message.startswith("DisagreementError")
    assert [event[0] for event in smallest["events"]] == ["add", "add", "schedule"]
    assert [len(event[1]["prompt"]) for event in smallest["events"][:2]] == [1, 1]


def test_a_trace_that_does_not_fail_cannot_be_shrunk() -> None:
    run = Comparison("base", CONFIG, {})
    run.apply(["pause", 1])
    with pytest.raises(ValueError, match="must fail"):
        shrink(run.trace)


def test_coverage_counts_what_the_events_show() -> None:
    policy = {"max_consecutive_prefills": 1}
    run = Comparison("neuron", CONFIG, policy)
    coverage = Coverage()
    coverage.start_run({"policy": "priority", "watermark": 0.0}, policy)
    for event in (
        ["add", {"id": "a", "prompt": [5] * 9, "max_tokens": 1}],
        ["add", {"id": "b", "prompt": [5] * 99, "max_tokens": 9, "min_tokens": 2}],
        ["add", {"id": "c", "prompt": [5] * 9, "max_tokens": 2, "salt": "x"}],
        ["schedule", 0],
        ["update", 0, [["a", []]]],
        ["schedule", 1],
        ["abort", ["c"]],
        ["update", 1, [["a", [7]]]],
        ["reset", 0],
        ["pause", 2],
    ):
        coverage.see(run.apply(event))
    assert {name: count for name, count in coverage.counts.items() if count} == {
        "runs by priority": 1,
        "runs with max_consecutive_prefills": 1,
        "requests with a salt": 1,
        "requests with min_tokens": 1,
        "steps": 2,
        "new requests": 1,
        "prefill chunks": 1,
        "refused requests": 1,
        "aborts while waiting": 1,
        "cache resets": 1,
        "pauses": 1,
        "finished: length": 1,
        "padding tokens": 7,
    }
    assert set(coverage.missing()) == set(FEATURES) - {n for n, c in coverage.counts.items() if c}
