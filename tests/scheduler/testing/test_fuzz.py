"""Scheduler and model agree on random work, and the fuzzer finds and shrinks what does not."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from segattn.cli import main
from segattn.reference.scheduler_state import NeuronRules
from segattn.scheduler.block_pool import BlockPool
from segattn.scheduler.policy import NeuronPolicy
from segattn.scheduler.request_queue import FCFSRequestQueue
from segattn.scheduler.testing import KINDS, RULES, Finding, Subject, describe, shrink
from segattn.scheduler.testing.compare import Comparison, DeadlockError
from segattn.scheduler.testing.coverage import FEATURES, Coverage
from segattn.scheduler.testing.fuzzing import campaign_until
from segattn.scheduler.testing.machine import Campaign
from segattn.scheduler.testing.replay import replay, replay_finding
from segattn.scheduler.testing.trace_file import read_traces

CONFIG: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "max_model_len": 16,
    "block_size": 4,
    "num_blocks": 9,
}


def compared(kind: str, config: dict[str, Any], policy: dict[str, Any]) -> Comparison:
    """Our scheduler of a kind beside the model."""
    return Comparison(Subject.own(kind), config, policy)


def run_rounds(campaign: Campaign) -> None:
    """Rounds of the fuzzer, more of them under a stronger Hypothesis profile."""
    for number in range(1 + settings().max_examples // 60):
        campaign_until(campaign, 0.0, number)
    if campaign.failure is not None:
        raise AssertionError(describe(shrink(campaign.failure)))


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_our_schedulers_keep_the_rules_in_every_step(kind: str, rules: str) -> None:
    run_rounds(Campaign(Subject.own(kind), rules))


@pytest.mark.parametrize("kind", KINDS[2:])
def test_scheduler_and_model_agree_under_the_documented_policy(kind: str) -> None:
    policy = asdict(NeuronRules.documented())
    run_rounds(Campaign(Subject.own(kind), "model", policy=policy))


def test_the_policies_of_model_and_scheduler_have_the_same_fields() -> None:
    assert asdict(NeuronRules()) == asdict(NeuronPolicy())
    assert asdict(NeuronRules.documented()) == asdict(NeuronPolicy.documented())


def test_options_that_the_model_does_not_have_need_the_other_judge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "config.json"
    given.write_text('{"config": {"max_num_seqs": 3, "max_num_active_seqs": 2}}')
    command = ["fuzz", "--minutes", "0", "--config", str(given), "--out", str(tmp_path / "out.gz")]
    assert main(command) == 2
    assert "max_num_active_seqs=2: the model has no rules for it" in capsys.readouterr().err
    assert main([*command, "--rules", "invariants"]) == 0


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
        assert replay_finding(trace) is not None
    # Two requests, and one event that shows their order.
    assert [event[0] for event in trace["events"][:2]] == ["add", "add"]
    assert len(trace["events"]) == 3
    assert replay(trace) is None
    assert replay_finding(trace) is None
    assert "segattn replay" in capsys.readouterr().out


def test_a_broken_account_of_blocks_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    run = compared("base", CONFIG, {})
    run.apply(["add", {"id": "a", "prompt": [5, 6], "max_tokens": 1}])
    run.apply(["schedule", 0])
    release = BlockPool.release

    def count_wrongly(self: BlockPool, tables: list[list[int]]) -> None:
        release(self, tables)
        self.ref_counts[tables[0][0]] = 1

    monkeypatch.setattr(BlockPool, "release", count_wrongly)
    with pytest.raises(RuntimeError, match=str(run.events[1][2]["new"][0][2][0])):
        run.apply(["abort", ["a"]])


def test_a_step_without_tokens_is_a_deadlock_under_the_default_policy() -> None:
    run = compared("neuron", CONFIG | {"max_num_seqs": 1}, {})
    run.apply(["add", {"id": "a", "prompt": [5, 6], "max_tokens": 3}])
    # Both sides are made to wait for ever, so that only the rule of progress can tell.
    run.model.model.rules = replace(run.model.model.rules, max_num_seqs=0)
    run.driver.scheduler.max_num_active_reqs = 0
    with pytest.raises(DeadlockError):
        run.apply(["schedule", 0])


def finding(run: Comparison) -> Finding:
    """What was given so far, as if it had failed."""
    return Finding(run.subject, "model", CONFIG, {}, run.events, AssertionError())


def test_shrinking_removes_what_the_failure_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    run = compared("base", CONFIG, {})
    for number in range(6):
        run.apply(["add", {"id": f"r{number}", "prompt": [5] * 9, "max_tokens": 4, "priority": 1}])
    run.apply(["abort", ["r2", "r3"]])
    monkeypatch.setattr(FCFSRequestQueue, "add_request", FCFSRequestQueue.prepend_request)
    smallest = shrink(finding(run))
    assert smallest.message.startswith("DisagreementError")
    assert [event[0] for event in smallest.events] == ["add", "add", "schedule"]
    assert [len(event[1]["prompt"]) for event in smallest.events[:2]] == [1, 1]


def test_a_trace_that_does_not_fail_cannot_be_shrunk() -> None:
    run = compared("base", CONFIG, {})
    run.apply(["pause", 1])
    with pytest.raises(ValueError, match="must fail"):
        shrink(finding(run))


def test_coverage_counts_what_the_events_show() -> None:
    policy = {"max_consecutive_prefills": 1}
    run = compared("neuron", CONFIG, policy)
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
